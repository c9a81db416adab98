"""Every kernel of a device against float64: shapes of Llama-3 8B and odd ones, random inputs, NaN in unused memory.

The expected values are computed on the host in float64 from the very inputs the kernel gets, so that the error of a
result is the kernel's alone. Bounds are those of the rounding of the result's dtype, times what a sum of the length may
add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs, LayerCache
from paged_backend.kernels.triton.backend import TritonKernels

_UNIT = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


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
    """tokens: rows of a product or norm. hidden, inner: of a layer. contexts: of the sequences. vocab: of logits."""

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


def check_kernels(kernels: TritonKernels, sizes: Sizes = FULL) -> Iterator[Check]:
    """Run every operation once per shape; a check that raises is a check that fails, with an error of NaN."""
    for name, run in _checks(kernels, sizes):
        kind = str(kernels.dtype).removeprefix("torch.")
        try:
            got, expected = run()
        except Exception as error:  # the other kernels are still worth knowing about
            yield Check(f"{name} {kind}: {type(error).__name__}: {error}", float("nan"), 0.0)
            continue
        scale = expected.abs().max().clamp(min=1e-30)
        worst = ((got.to("cpu", torch.float64) - expected).abs().max() / scale).item()
        yield Check(f"{name} {kind}", worst, 0.0 if got.dtype == torch.int64 else _UNIT[got.dtype])


Run = Callable[[], tuple[Tensor, Tensor]]


def _checks(kernels: TritonKernels, sizes: Sizes) -> Iterator[tuple[str, Run]]:
    device, dtype = kernels.device, kernels.dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, residual = random(sizes.tokens, sizes.hidden), random(sizes.tokens, sizes.hidden)
    weight = torch.rand(sizes.hidden, device=device)

    def norm() -> tuple[Tensor, Tensor]:
        return kernels.rms_norm(x, weight, 1e-5), _norm(_wide(x), _wide(weight))

    def fused() -> tuple[Tensor, Tensor]:
        total = residual.clone()
        out = kernels.add_rms_norm(x, total, weight, 1e-5)
        return torch.cat([out, total]), torch.cat(
            [_norm(_wide(total), _wide(weight)), _wide(x) + _wide(residual)]
        )

    yield "rms_norm", norm
    yield "add_rms_norm", fused
    gates = random(sizes.tokens, 2 * sizes.inner)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield f"{activation} and mul", partial(_act, kernels, gates, activation)
    for storage in ("auto", "int8", "int4"):
        for rows in (1, sizes.tokens):
            yield f"linear {storage}, {rows} rows", partial(_linear, kernels, random, storage, rows, sizes)
    for heads in sizes.heads:
        yield f"rotary and cache {heads}", partial(_rotary, kernels, random, heads, sizes.tokens)
        for everything in (False, True):
            for decode in (True, False):
                name = f"attention {heads}, {'decode' if decode else 'prefill'}"
                if everything:
                    name += ", window, soft cap, sinks"
                yield name, partial(_attention, kernels, random, heads, everything, decode, sizes)
    yield "copy_blocks", partial(_copies, kernels, random)
    yield "sample", partial(_draws, kernels, sizes.vocab)


def _act(kernels: TritonKernels, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
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
    kernels: TritonKernels, random: Callable[..., Tensor], storage: str, rows: int, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    weight, bias = random(sizes.inner // 4, sizes.hidden), random(sizes.inner // 4)
    packed = kernels.pack_linear([weight], [bias], storage)
    stored = kernels.embedding(torch.arange(len(weight), device=kernels.device), packed)
    x = random(rows, sizes.hidden)
    return kernels.linear(x, packed), _wide(x) @ _wide(stored).T + _wide(bias)


def _rotary(
    kernels: TritonKernels, random: Callable[..., Tensor], shape: tuple[int, int, int], tokens: int
) -> tuple[Tensor, Tensor]:
    heads, groups, dim = shape
    device, half = kernels.device, dim // 2
    qkv = random(tokens, heads + 2 * groups, dim)
    before = _wide(qkv)
    angles = torch.rand(tokens, half, device=device) * 6
    cache = _poisoned(kernels, tokens, groups, dim)
    slots = torch.randperm(tokens * 16, device=device)[:tokens]
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
    random: Callable[..., Tensor],
    shape: tuple[int, int, int],
    everything: bool,
    decode: bool,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    heads, groups, dim = shape
    device = kernels.device
    window, softcap = (37, 5.0) if everything else (None, None)
    sinks = torch.randn(heads, device=device) if everything else None
    counts = [-(-c // 16) for c in sizes.contexts]
    ids = (torch.randperm(sum(counts)) + 1).split(counts)
    cache = _poisoned(kernels, sum(counts) + 1, groups, dim)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    queries = [1 if decode else min(c, 90) for c in sizes.contexts]
    q = random(sum(queries), heads, dim)
    expected, first = [], 0
    for i, (context, blocks, count) in enumerate(zip(sizes.contexts, ids, queries)):
        table[i, : len(blocks)] = blocks
        k, v = random(context, groups, dim), random(context, groups, dim)
        at = torch.arange(context)
        cache.key[blocks[at // 16].to(device), :, :, (at % 16).to(device)] = k
        cache.value[blocks[at // 16].to(device), :, (at % 16).to(device)] = v
        part = _wide(q[first : first + count])
        expected.append(_attend(part, _wide(k), _wide(v), dim**-0.5, window, softcap, sinks))
        first += count
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lens = torch.tensor(sizes.contexts, dtype=torch.int32, device=device)
    slots = torch.zeros(len(q), dtype=torch.int64, device=device)
    plan = kernels.plan(AttentionInputs(start, lens, table.to(device), slots))
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


def _copies(kernels: TritonKernels, random: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    caches = [LayerCache(random(6, 2, 32, 16), random(6, 2, 16, 32)) for _ in range(3)]
    origin = [0, 1, 2, 3, 1, 2]
    expected = torch.stack([_wide(t)[origin].flatten() for c in caches for t in (c.key, c.value)])
    kernels.copy_blocks(caches, [(1, 4), (2, 5)])
    return torch.stack([t.flatten() for c in caches for t in (c.key, c.value)]), expected


def _draws(kernels: TritonKernels, vocab: int) -> tuple[Tensor, Tensor]:
    """Token ids beside those of the host's sampler, from the same noise."""
    from paged_backend.runner.device_runner import sampling_columns
    from paged_backend.runner.sampler import Sampled, Sampler, SampleRow
    from paged_backend.sampling_params import SamplingParams

    cases = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=20),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.8, min_p=0.02),
    )
    rows = [SampleRow(params.resolved({}), [], [], seed) for seed, params in enumerate(cases)]
    logits = torch.randn(len(rows), vocab, device=kernels.device) * 3
    columns = {name: torch.from_numpy(c).to(kernels.device) for name, c in sampling_columns(rows).items()}
    drawn = [one.token_id if isinstance(one, Sampled) else -1 for one in Sampler().sample(logits, rows)]
    return kernels.sample(logits, **columns), torch.tensor(drawn, dtype=torch.float64)
