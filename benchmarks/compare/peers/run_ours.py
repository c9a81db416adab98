"""Worker for paged_backend itself: the same protocol as the peers, through the public engine."""

from __future__ import annotations

import asyncio
import time

from worker_protocol import serve


class Ours:
    packages = ("paged-backend", "torch")

    def __init__(self, request):
        from paged_backend import SamplingParams, get_engine
        from paged_backend.sampling_params import RequestOutputKind

        self._params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self.streamed = request["stream"]
        options = {
            "threads": request["threads"],
            "max_model_len": request["max_len"],
            "max_num_seqs": request["max_seqs"],
            "enable_prefix_caching": request["prefix_cache"],
            "max_num_batched_tokens": max(512, request["max_seqs"]),
            **request["options"],
        }
        self.engine = get_engine(request["model"], share=False, **options)

    def run(self, requests):
        return asyncio.run(self._stream(requests)) if self.streamed else self._batch(requests)

    def _sampling(self, request, **more):
        n = request["output"]
        return self._params(
            temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, **more
        )

    def _batch(self, requests):
        if any(r["after"] for r in requests):
            raise RuntimeError("requests that enter later need stream=True")
        prompts = [{"prompt_token_ids": r["prompt"]} for r in requests]
        handles = self.engine.submit_many(prompts, [self._sampling(r) for r in requests])
        done = []
        for output in [handle.result() for handle in handles]:
            first = output.metrics.first_token_time if output.metrics is not None else None
            times = [first] if first is not None else None
            done.append({"tokens": output.outputs[0].token_ids, "times": times})
        return done

    async def _stream(self, requests):
        first = [i for i, r in enumerate(requests) if not r["after"]]
        counts = [0] * len(requests)
        progress = asyncio.Condition()

        async def one(i):
            request = requests[i]
            if request["after"]:
                async with progress:
                    await progress.wait_for(lambda: min(counts[j] for j in first) >= request["after"])
            tokens, times = [], []
            params = self._sampling(request, output_kind=self._delta)
            async for output in self.engine.generate({"prompt_token_ids": request["prompt"]}, params):
                new = output.outputs[0].token_ids
                tokens.extend(new)
                times.extend([time.perf_counter()] * len(new))
                counts[i] = len(tokens)
                async with progress:
                    progress.notify_all()
            return {"tokens": tokens, "times": times}

        return await asyncio.gather(*(one(i) for i in range(len(requests))))

    def close(self):
        self.engine.close()


if __name__ == "__main__":
    serve(Ours)
