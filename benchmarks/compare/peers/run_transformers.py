"""Worker for transformers. Model: a Hugging Face folder.

Options: dtype; mode (``single``: one by one; ``batch``: static batches of ``size``, each as long as its longest
request; ``continuous``: the manager behind ``generate_batch``, which takes a length per request); size; attention.
"""

from __future__ import annotations

import time

from worker_protocol import only_together, serve


def load(request):
    options = dict(request["options"])
    mode = options.pop("mode", "single")
    modes = {"single": Static, "batch": Static, "continuous": Continuous}
    if mode not in modes:
        raise ValueError(f"mode must be one of {sorted(modes)}, got {mode!r}")
    size = int(options.pop("size", 16)) if mode == "batch" else 1
    return modes[mode](request, options, size)


class Model:
    packages = ("transformers", "torch")

    def __init__(self, request, options):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(request["threads"])
        self.torch = torch
        dtype = getattr(torch, options.pop("dtype", "float32"))
        attention = options.pop("attention", "sdpa")
        if options:
            raise ValueError(f"unknown options {sorted(options)}; known: dtype, mode, size, attention")
        self.model = AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=dtype, attn_implementation=attention
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0


class Clock:
    """A streamer that notes when each token of a batch of one arrives."""

    def __init__(self):
        self.times = []
        self._prompt_seen = False

    def put(self, value):
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self):
        pass


class Static(Model):
    def __init__(self, request, options, size):
        super().__init__(request, options)
        self.size = size

    def run(self, requests):
        only_together(requests, "generate()")
        done = []
        for at in range(0, len(requests), self.size):
            done.extend(self._batch(requests[at : at + self.size]))
        return done

    def _batch(self, requests):
        torch = self.torch
        width = max(len(r["prompt"]) for r in requests)
        longest = max(r["output"] for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):  # padded on the left: generation goes on at the right end
            ids[row, width - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, width - len(request["prompt"]) :] = 1
        clock = Clock() if len(requests) == 1 else None
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                streamer=clock,
            )
        times = clock.times if clock is not None else None
        return [
            {"tokens": out[row, width : width + r["output"]].tolist(), "times": times}
            for row, r in enumerate(requests)
        ]


class Continuous(Model):
    def __init__(self, request, options, size):
        super().__init__(request, options)
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(
            max_new_tokens=request["max_len"], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(
            page_size=16 if request["prefix_cache"] else 256,
            num_blocks=max(
                64, request["max_seqs"] * request["max_len"] // (16 if request["prefix_cache"] else 256)
            ),
            max_batch_tokens=512,
            allow_block_sharing=request["prefix_cache"],
            use_cuda_graph=False,
        )
        self.manager = self.model.init_continuous_batching(config, batching)
        self.manager.start()
        self._count = 0

    def run(self, requests):
        counts = [0] * len(requests)
        tokens: list[list[int]] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        late = [i for i, r in enumerate(requests) if r["after"]]
        first = [i for i, r in enumerate(requests) if not r["after"]]
        names = {}
        for i in first:
            names[self._add(requests[i], bool(late))] = i
        open_ = set(range(len(requests)))
        while open_:
            result = self.manager.get_result(timeout=1)
            now = time.perf_counter()
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the continuous batching loop ended")
                continue
            if result.error:
                raise RuntimeError(result.error)
            i = names[result.request_id]
            new = result.generated_tokens[counts[i] :]
            tokens[i].extend(new)
            times[i].extend([now] * len(new))
            counts[i] = len(tokens[i])
            if result.is_finished():
                open_.discard(i)
                if result.timestamps:
                    times[i] = list(result.timestamps)
            for j in [j for j in late if min(counts[k] for k in first) >= requests[j]["after"]]:
                late.remove(j)
                names[self._add(requests[j], True)] = j
        return [{"tokens": t, "times": s} for t, s in zip(tokens, times)]

    def _add(self, request, streaming):
        self._count += 1
        return self.manager.add_request(
            request["prompt"],
            request_id=f"r{self._count}",
            max_new_tokens=request["output"],
            eos_token_id=-1,
            streaming=streaming,
            record_timestamps=True,
        )

    def close(self):
        self.manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    serve(load)
