"""Worker for a text-generation pipeline: transformers' own, or ours. Model: a Hugging Face folder (for ours also GGUF).

The prompts of a request are chats or texts instead of token ids, and all of them go into one call of the pipeline. An
answer ends where the model ends it; its tokens are those up to its end, without the padding of a static batch.

Options: side (``transformers`` or ``ours``); batch_size of transformers' pipeline; dtype; max_new_tokens; ignore_eos;
the others are engine options.
"""

from __future__ import annotations

from worker_protocol import serve

NO_TOKEN = 10**6
"""An end token that no vocabulary has."""


class Pipeline:
    packages = ("paged-backend", "transformers", "torch")

    def __init__(self, request):
        import torch

        options = dict(request["options"])
        torch.set_num_threads(request["threads"])
        side, batch_size = options.pop("side"), options.pop("batch_size", None)
        dtype = options.pop("dtype", "auto" if side == "ours" else "float32")
        self.call = {"do_sample": False, "max_new_tokens": options.pop("max_new_tokens")}
        if options.pop("ignore_eos", False):
            self.call["eos_token_id"] = NO_TOKEN
        if side == "ours":
            from paged_backend.adapters.huggingface import pipeline

            options = {"threads": request["threads"], "max_num_seqs": request["max_seqs"], **options}
            self.pipe = pipeline("text-generation", model=request["model"], dtype=dtype, **options)
        else:
            from transformers import pipeline

            if options:
                raise ValueError(f"transformers' pipeline has no options {sorted(options)}")
            self.pipe = pipeline(
                "text-generation", model=request["model"], dtype=getattr(torch, dtype), device="cpu"
            )
            self.call["batch_size"] = batch_size
        tokenizer = self.pipe.tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token_id = tokenizer.eos_token_id
        self._sequences = []
        self._postprocess, self.pipe.postprocess = self.pipe.postprocess, self._keep

    def _keep(self, outputs, **options):
        self._sequences.append(outputs["generated_sequence"])
        return self._postprocess(outputs, **options)

    def run(self, requests):
        prompts = [r["prompt"] for r in requests]
        self._sequences.clear()
        results = self.pipe(prompts, **self.call)
        if len(results) != len(prompts) or len(self._sequences) != len(prompts):
            raise RuntimeError(f"{len(results)} results for {len(prompts)} prompts")
        return [{"tokens": self._new(p, s)} for p, s in zip(prompts, self._sequences)]

    def _new(self, prompt, sequence):
        """The answer's tokens, its end token included. sequence: [1, 1, padding + prompt + answer + padding]."""
        tokenizer = self.pipe.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        row = sequence[0][0].tolist()
        pad = next((i for i, token in enumerate(row) if token != tokenizer.pad_token_id), 0)
        if row[pad : pad + len(ids)] != ids:
            raise RuntimeError("the result does not begin with its prompt")
        new = row[pad + len(ids) :]
        ends = self.pipe.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        if "eos_token_id" in self.call:
            ends = set()
        return new[: next((i + 1 for i, token in enumerate(new) if token in ends), len(new))]


if __name__ == "__main__":
    serve(Pipeline)
