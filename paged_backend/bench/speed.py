"""How fast an engine is on this machine: many requests at once, and one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from paged_backend.bench.workloads import BenchRequest, Workload
from paged_backend.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine


def throughput(engine: Engine, workload: Workload) -> dict[str, float]:
    """All requests at once. ``tokens_per_s``: output tokens; ``all_tokens_per_s``: with those of the prompts;
    ``first_token_s``: median of the requests'; ``seconds``: until the last token."""
    _together(engine, workload.warmup)
    firsts, seconds = _together(engine, workload.requests)
    return {
        "tokens_per_s": workload.output_tokens / seconds,
        "all_tokens_per_s": (workload.prompt_tokens + workload.output_tokens) / seconds,
        "first_token_s": median(firsts),
        "seconds": seconds,
    }


def latency(engine: Engine, workload: Workload) -> dict[str, float]:
    """Each request alone, medians over them: ``first_token_ms`` from its submission, ``ms_per_token`` after that, and
    ``tokens_per_s``, the whole answer's."""
    for request in workload.warmup:
        _alone(engine, request)
    found = [_alone(engine, request) for request in workload.requests]
    return {
        "first_token_ms": median(1e3 * first for first, _ in found),
        "ms_per_token": median(
            1e3 * (last - first) / (r.output - 1) for r, (first, last) in zip(workload.requests, found)
        ),
        "tokens_per_s": median(r.output / last for r, (_, last) in zip(workload.requests, found)),
    }


def _together(engine: Engine, requests: Sequence[BenchRequest]) -> tuple[list[float], float]:
    """Seconds to the first token of each, and to the last of all."""
    prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    params = [_greedy(r.output) for r in requests]
    began, clock = time.perf_counter(), time.monotonic()
    outputs = [handle.result() for handle in engine.submit_many(prompts, params)]
    seconds = time.perf_counter() - began
    for request, output in zip(requests, outputs):
        _check(request, len(output.outputs[0].token_ids))
    times = [output.metrics.first_token_time for output in outputs if output.metrics is not None]
    return [first - clock for first in times if first is not None], seconds


def _alone(engine: Engine, request: BenchRequest) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    params = _greedy(request.output, RequestOutputKind.DELTA)
    stamps, made = [], 0
    began = time.perf_counter()
    for output in engine.submit({"prompt_token_ids": list(request.prompt)}, params):
        if new := len(output.outputs[0].token_ids):
            stamps.append(time.perf_counter() - began)
            made += new
    _check(request, made)
    return stamps[0], stamps[-1]


def _check(request: BenchRequest, made: int) -> None:
    if made != request.output:
        raise RuntimeError(f"an answer has {made} tokens, {request.output} were asked for")


def _greedy(length: int, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SamplingParams:
    """Exactly ``length`` tokens, whatever the model would say."""
    return SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind
    )
