"""Attention by itself as a share of what the card can do, which is measured too, not taken from a data sheet.

A launch costs the host more than a small case costs the GPU, and a small cache stays in the GPU's L2: calls are timed
inside a CUDA graph therefore, over as many caches as an L2 cannot hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

from benchmarks.device.report import Report
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.triton.backend import TritonKernels

_HEADS, _GROUPS, _DIM, _BLOCK = 32, 8, 128, 16  # of Llama-3 8B
_COLD = 256 << 20  # bytes; several times any L2
_CALLS = 40
_WARM_SECONDS = 0.05
DECODES = ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (64, 8192))
PREFILLS = ((1, 2048), (1, 8192), (4, 2048))


def measure_ceilings(report: Report, device: str = "cuda", copied: int = 1 << 30, side: int = 8192) -> None:
    """What the shares in the report are of: copying ``copied`` bytes, and a bf16 product of ``side`` cubed."""
    on = torch.device(device)
    source = torch.empty(copied, dtype=torch.uint8, device=on).random_()
    target = torch.empty_like(source)
    report.bandwidth = 2 * copied / seconds_per_call([lambda: target.copy_(source)], on)
    report.add("copy bandwidth", report.bandwidth / 1e12, "TB/s")
    a, b = (_normal(on, torch.bfloat16, side, side) for _ in range(2))
    report.peak = 2 * side**3 / seconds_per_call([lambda: a @ b], on)
    report.add(f"bf16 matmul, {side} cubed", report.peak / 1e12, "TFLOP/s")


def measure_attention(
    report: Report,
    deadline: float = float("inf"),
    kernels: TritonKernels | None = None,
    decodes: Sequence[tuple[int, int]] = DECODES,
    prefills: Sequence[tuple[int, int]] = PREFILLS,
    cold: int = _COLD,
) -> None:
    """Each (batch, context) of decode as a share of copy bandwidth, of prefill as a share of a large bf16 product.

    cold: bytes of the caches that the calls go round. deadline: of ``time.monotonic()``, to begin no case after.
    """
    kernels = kernels or TritonKernels("cuda", "bfloat16")
    cases = [("decode", *case) for case in decodes] + [("prefill", *case) for case in prefills]
    for kind, batch, context in cases:
        name = f"{kind} attention, {batch} x {context}"
        if time.monotonic() > deadline:
            report.note(f"{name}: left out, the time was used up")
            continue
        seconds = time_attention(kernels, batch, 1 if kind == "decode" else context, context, cold)
        report.add(f"{name}: one layer", 1e6 * seconds, "us")
        if kind == "decode":
            read = batch * context * 2 * _GROUPS * _DIM * kernels.torch_dtype.itemsize
            of, share = "copy bandwidth", read / seconds / report.bandwidth if report.bandwidth else None
        else:
            work = batch * 4 * _HEADS * _DIM * context * (context + 1) / 2
            of, share = "bf16 matmul", work / seconds / report.peak if report.peak else None
        if share is not None:
            report.add(name, 100 * share, f"% of {of}")


def time_attention(
    kernels: TritonKernels, batch: int, queries: int, context: int, cold: int = _COLD
) -> float:
    """Seconds of one layer's attention with the heads of Llama-3 8B, blocks in random order, caches not in the L2."""
    device = kernels.torch_device
    per_sequence = -(-context // _BLOCK)
    blocks = batch * per_sequence + 1
    count = -(-cold // (2 * blocks * _GROUPS * _DIM * _BLOCK * kernels.torch_dtype.itemsize))
    caches = kernels.empty_cache(count, blocks, _GROUPS, _DIM, _BLOCK, kernels.dtype)
    generator = torch.Generator(device).manual_seed(0)
    for cache in caches:
        cache.key.normal_(generator=generator)
        cache.value.normal_(generator=generator)
    order = torch.randperm(blocks - 1, generator=generator, device=device) + 1
    inputs = AttentionInputs(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        torch.full((batch,), context, dtype=torch.int32, device=device),
        order.to(torch.int32).view(batch, per_sequence),
        torch.zeros(batch * queries, dtype=torch.int64, device=device),
    )
    q = _normal(device, kernels.torch_dtype, batch * queries, _HEADS, _DIM)
    plan = kernels.plan(inputs)

    def call(index: int) -> Callable[[], object]:
        return lambda: kernels.paged_attention(plan, q, caches[index], _DIM**-0.5)

    return seconds_per_call([call(i) for i in range(count)], device)


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = 20) -> float:
    """What one of ``calls`` takes when they run one after another, round and round.

    On a GPU a graph of some 40 calls (whole rounds) is replayed, after replays that warm up, and the median replay
    counts; on a CPU one round, by the wall.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # compiles kernels and makes workspaces, which a capture must not
    torch.cuda.synchronize()
    rounds = -(-_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(rounds):
            for call in calls:
                call()
    warm = time.perf_counter() + _WARM_SECONDS  # an idle card's clocks are low
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3 / (rounds * len(calls))
