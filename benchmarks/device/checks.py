"""Every kernel of a device against float64: shapes of Llama-3 8B and odd ones, random inputs, NaN in unused memory.

The expected values are computed on the host in float64 from the very inputs the kernel gets, so that the error of a
result is the kernel's alone. Bounds are those of the rounding of the result's dtype, times what a sum of the length may
add to it. Inputs are the same in every run and on every device, so that a failure can be repeated, interpreted too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device.draws import draws, penalised
from benchmarks.device.report import Report, one_line, still_works
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.tensor import as_array
from paged_backend.kernels.triton.backend import TritonKernels

_BOUND = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float64: 1e-5}


@dataclass(frozen=True, slots=True)
class Check:
    """error: largest difference from float64, relative to the largest value. Passed if at most ``bound``."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # a NaN does not


@dataclass(frozen=True, slots=True)
class Sizes:
    """tokens: rows of a product or norm. hidden, inner: of a layer. contexts: of the sequences. vocab: of logits.

    heads: (heads, key heads, head size) of attention, each a case.
    """

    tokens: int
    hidden: int
    inner: int
    contexts: tuple[int, ...]
    vocab: int
    heads: tuple[tuple[int, int, int], ...]


FULL = Sizes(
    67,
    4096,
    14336,
    (1, 17, 700, 4096),
    128256,
    ((32, 8, 128), (9, 3, 64), (16, 8, 256), (4, 4, 80), (50, 1, 32)),
)
TINY = Sizes(3, 40, 48, (1, 30), 50, ((4, 2, 32), (3, 1, 20)))
_SHAPES = (("bfloat16", 99), ("float16", 2), ("float32", 2))  # dtypes, and how many head shapes of each


def check_all(
    report: Report, deadline: float = float("inf"), device: str = "cuda", sizes: Sizes = FULL
) -> None:
    """Every kernel in every dtype, of float16 and float32 few head shapes, as each costs seconds of compiling.

    deadline: of ``time.monotonic()``, to begin no check after. Ends early if the GPU no longer answers.
    """
    for dtype, shapes in _SHAPES:
        begin, before, left = time.monotonic(), report.checks_passed, []
        for name, run in checks(TritonKernels(device, dtype), replace(sizes, heads=sizes.heads[:shapes])):
            if time.monotonic() > deadline:
                left.append(name)
                continue
            check = run()
            if check.passed:
                report.checks_passed += 1
                continue
            report.checks_failed.append(f"{check.name}: {check.error:.2e} > {check.bound:.2e}")
            report.tell(f"FAILED  {report.checks_failed[-1]}")
            if math.isnan(check.error) and not still_works():
                return
        report.tell(
            f"{dtype}: {report.checks_passed - before} checks passed, {time.monotonic() - begin:.1f} s"
        )
        if left:
            report.note(f"{dtype}: {len(left)} checks left out, the time was used up: {'; '.join(left)}")
        if sizes.heads[shapes:]:
            others = ", ".join(map(str, sizes.heads[shapes:]))
            report.note(f"{dtype}: attention with heads {others} is checked in bfloat16 only")


class Random:
    """Random tensors, made on the host and put on a device; the same for the same calls."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(*shape, generator=self._generator).to(self.device)

    def order(self, count: int) -> Tensor:
        """The numbers below ``count`` in random order."""
        return torch.randperm(count, generator=self._generator).to(self.device)


Run = Callable[[Random], tuple[Tensor, Tensor]]


def check_kernels(kernels: TritonKernels, sizes: Sizes = FULL) -> Iterator[Check]:
    """Run every operation once per shape."""
    for _, run in checks(kernels, sizes):
        yield run()


def checks(kernels: TritonKernels, sizes: Sizes) -> list[tuple[str, Callable[[], Check]]]:
    """Every check by its name. One that raises is a check that fails, with an error of NaN."""
    return [(name, partial(_check, kernels, name, run)) for name, run in _operations(kernels, sizes)]


def _check(kernels: TritonKernels, name: str, run: Run) -> Check:
    kind = kernels.dtype
    try:
        got, expected = run(Random(kernels.torch_device, kernels.torch_dtype))
        scale = expected.abs().max().clamp(min=1e-30)
        worst = ((_wide(got) - expected).abs().max() / scale).item()
        return Check(f"{name} {kind}", worst, _BOUND[got.dtype])
    except Exception as error:  # the other kernels are still worth knowing about
        return Check(f"{name} {kind}: {one_line(error)}", float("nan"), 0.0)


def _operations(kernels: TritonKernels, sizes: Sizes) -> Iterator[tuple[str, Run]]:
    yield "rms_norm", partial(_rms_norm, kernels, sizes)
    yield "add_rms_norm", partial(_add_rms_norm, kernels, sizes)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield f"{activation} and mul", partial(_act, kernels, sizes, activation)
    for storage in ("auto", "int8", "int4"):
        for rows in (1, sizes.tokens):
            yield f"linear {storage}, {rows} rows", partial(_linear, kernels, sizes, storage, rows)
    for heads in sizes.heads:
        yield f"rotary and cache {heads}", partial(_rotary, kernels, heads, sizes.tokens)
        for everything in (False, True):
            for decode in (True, False):
                name = f"attention {heads}, {'decode' if decode else 'prefill'}"
                if everything:
                    name += ", window, soft cap, sinks"
                yield name, partial(_attention, kernels, sizes, heads, everything, decode)
    yield "copy_blocks", partial(_copies, kernels)
    yield "penalties", lambda random: penalised(kernels, random.normal(16, sizes.vocab, dtype=torch.float32))
    yield "sample", lambda random: draws(kernels, 2.0 * random.normal(16, sizes.vocab, dtype=torch.float32))


def _rms_norm(kernels: TritonKernels, sizes: Sizes, random: Random) -> tuple[Tensor, Tensor]:
    x, weight = random.normal(sizes.tokens, sizes.hidden), random.uniform(sizes.hidden)
    return kernels.rms_norm(x, weight, 1e-5), _norm(_wide(x), _wide(weight))


def _add_rms_norm(kernels: TritonKernels, sizes: Sizes, random: Random) -> tuple[Tensor, Tensor]:
    x, residual = (random.normal(sizes.tokens, sizes.hidden) for _ in range(2))
    weight, total = random.uniform(sizes.hidden), residual.clone()
    out = kernels.add_rms_norm(x, total, weight, 1e-5)
    expected = [_norm(_wide(total), _wide(weight)), _wide(x) + _wide(residual)]
    return torch.cat([out, total]), torch.cat(expected)


def _act(kernels: TritonKernels, sizes: Sizes, activation: str, random: Random) -> tuple[Tensor, Tensor]:
    x = random.normal(sizes.tokens, 2 * sizes.inner)
    return kernels.act_and_mul(x, activation), _gated(_wide(x), activation)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _gated(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _linear(
    kernels: TritonKernels, sizes: Sizes, storage: str, rows: int, random: Random
) -> tuple[Tensor, Tensor]:
    weight, bias = random.normal(sizes.inner // 4, sizes.hidden), random.normal(sizes.inner // 4)
    packed = kernels.pack_linear([as_array(weight)], [as_array(bias)], storage)
    stored = kernels.embedding(torch.arange(len(weight), device=kernels.torch_device), packed)
    x = random.normal(rows, sizes.hidden)
    return kernels.linear(x, packed), _wide(x) @ _wide(stored).T + _wide(bias)


def _rotary(
    kernels: TritonKernels, shape: tuple[int, int, int], tokens: int, random: Random
) -> tuple[Tensor, Tensor]:
    heads, groups, dim = shape
    half = dim // 2
    qkv = random.normal(tokens, heads + 2 * groups, dim)
    before = _wide(qkv)
    angles = random.uniform(tokens, half) * 6
    cache = _poisoned(kernels, tokens, groups, dim)
    slots = random.order(tokens * 16)[:tokens]
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + groups], qkv[:, heads + groups :]
    kernels.rotary_and_cache(q, k, v, angles.cos(), angles.sin(), cache, slots)
    cos, sin = _wide(angles.cos())[:, None], _wide(angles.sin())[:, None]
    low, high = before[..., :half], before[..., half:]
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    written = torch.cat(
        [cache.key[slots // 16, :, :, slots % 16], cache.value[slots // 16, :, slots % 16]], 1
    )
    expected = torch.cat(
        [turned[:, : heads + groups], turned[:, heads : heads + groups], before[:, heads + groups :]], 1
    )
    return torch.cat([qkv[:, : heads + groups], written], 1), expected


def _poisoned(kernels: TritonKernels, blocks: int, groups: int, dim: int) -> LayerCache:
    cache = kernels.empty_cache(1, blocks, groups, dim, 16, kernels.dtype)[0]
    cache.key.fill_(float("nan"))
    cache.value.fill_(float("nan"))
    return cache


def _attention(
    kernels: TritonKernels,
    sizes: Sizes,
    shape: tuple[int, int, int],
    everything: bool,
    decode: bool,
    random: Random,
) -> tuple[Tensor, Tensor]:
    heads, groups, dim = shape
    device = kernels.torch_device
    window, softcap = (37, 5.0) if everything else (None, None)
    sinks = random.normal(heads, dtype=torch.float32) if everything else None
    counts = [-(-c // 16) for c in sizes.contexts]
    ids = (random.order(sum(counts)) + 1).split(counts)
    cache = _poisoned(kernels, sum(counts) + 1, groups, dim)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    queries = [1 if decode else min(c, 90) for c in sizes.contexts]
    q = random.normal(sum(queries), heads, dim)
    expected, first = [], 0
    for i, (context, blocks, count) in enumerate(zip(sizes.contexts, ids, queries)):
        table[i, : len(blocks)] = blocks
        k, v = (random.normal(context, groups, dim) for _ in range(2))
        at = torch.arange(context, device=device)
        cache.key[blocks[at // 16], :, :, at % 16] = k
        cache.value[blocks[at // 16], :, at % 16] = v
        part = _wide(q[first : first + count])
        expected.append(_attend(part, _wide(k), _wide(v), dim**-0.5, window, softcap, sinks))
        first += count
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lens = torch.tensor(sizes.contexts, dtype=torch.int32, device=device)
    slots = torch.zeros(len(q), dtype=torch.int64, device=device)
    plan = kernels.plan(AttentionInputs(start, lens, table, slots))
    return kernels.paged_attention(plan, q, cache, dim**-0.5, window, softcap, sinks), torch.cat(expected)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    count, heads, _ = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(k) - count, len(k))[:, None] - torch.arange(len(k))
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, _wide(sinks)[:, None, None].expand(-1, count, 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)


def _copies(kernels: TritonKernels, random: Random) -> tuple[Tensor, Tensor]:
    caches = [LayerCache(random.normal(6, 2, 32, 16), random.normal(6, 2, 16, 32)) for _ in range(3)]
    origin = [0, 1, 2, 3, 1, 2]
    expected = torch.stack([_wide(t)[origin].flatten() for c in caches for t in (c.key, c.value)])
    kernels.copy_blocks(caches, [(1, 4), (2, 5)])
    return torch.stack([t.flatten() for c in caches for t in (c.key, c.value)]), expected
