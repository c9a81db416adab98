"""ReferenceKernels: every operation in plain torch; oracle of the other backends, fallback everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs, Kernels, LayerCache, PackedLinear

_STORAGE = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}

# Queries scored at once; bounds the score matrix of a long prefill at H * tile * context floats.
_QUERY_TILE = 128


class ReferenceLinear(PackedLinear):
    """weight [N, K] float32 or bfloat16, bias [N] float32 or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class _Query:
    """One sequence of the step: rows start..stop of the flat batch are its positions first..seq_len - 1."""

    start: int
    stop: int
    first: int
    seq_len: int
    blocks: Tensor


class ReferenceKernels(Kernels):
    """Plain torch, fp32 math, no state. Weights are held as float32, or bfloat16 if asked for."""

    name = "reference"

    def pack_linear(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, dtype: str = "auto"
    ) -> ReferenceLinear:
        if dtype in ("int8", "int4"):
            raise ValueError(f"{dtype} weights need the C kernels; the torch reference kernels have none")
        if dtype not in _STORAGE:
            raise ValueError(f"dtype must be one of {', '.join(_STORAGE)}, got {dtype!r}")
        if not weights or any(w.dim() != 2 or w.shape[1] != weights[0].shape[1] for w in weights):
            raise ValueError("pack_linear needs matrices [N_i, K] that share K")
        # cat copies even a single matrix: a view of a memory-mapped file would die with the file
        weight = torch.cat([w.to(_STORAGE[dtype]) for w in weights])
        bias = None
        if biases is not None and any(b is not None for b in biases):
            bias = torch.cat(
                [
                    torch.zeros(w.shape[0]) if b is None else b.to(torch.float32)
                    for w, b in zip(weights, biases)
                ]
            )
        return ReferenceLinear(weight, bias)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        packed = _unpack(weight)
        return F.linear(x, packed.weight.to(torch.float32), packed.bias)

    def embedding(self, ids: Tensor, table: PackedLinear) -> Tensor:
        return _unpack(table).weight[ids].to(torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        half = cos.shape[-1]
        cos, sin = cos[:, None], sin[:, None]
        for x in (q, k):
            low, high = x[..., :half], x[..., half : 2 * half]
            rotated = low * cos - high * sin
            high.copy_(high * cos + low * sin)
            low.copy_(rotated)
        block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
        cache.key[block, :, :, offset] = k.to(cache.key.dtype)
        cache.value[block, :, offset] = v.to(cache.value.dtype)

    def plan(self, inputs: AttentionInputs) -> list[_Query]:
        bounds, lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        table = inputs.block_table.to(torch.int64)
        return [
            _Query(start, stop, seq_len - (stop - start), seq_len, row)
            for start, stop, seq_len, row in zip(bounds[:-1], bounds[1:], lens, table)
        ]

    def paged_attention(
        self,
        plan: list[_Query],
        q: Tensor,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens, heads, dim = q.shape
        out = q.new_empty(tokens, heads * dim)
        for query in plan:
            for start in range(query.start, query.stop, _QUERY_TILE):
                stop = min(start + _QUERY_TILE, query.stop)
                first = query.first + start - query.start
                result = _attend(q[start:stop], first, query.blocks, cache, scale, window, softcap, sinks)
                out[start:stop] = result.reshape(stop - start, heads * dim)
        return out

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        if activation == "gelu":
            return F.gelu(gate) * up
        if activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        raise ValueError(f"activation must be silu, gelu or gelu_tanh, got {activation!r}")

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, destination = (torch.tensor(ids) for ids in zip(*pairs))
        for cache in caches:
            cache.key[destination] = cache.key[source]
            cache.value[destination] = cache.value[source]


def _unpack(weight: PackedLinear) -> ReferenceLinear:
    if not isinstance(weight, ReferenceLinear):
        raise TypeError(f"weights were packed by another backend ({type(weight).__name__}); pack them here")
    return weight


def _attend(
    q: Tensor,
    first: int,
    blocks: Tensor,
    cache: LayerCache,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of queries q [n, H, D] at positions first .. first + n - 1 of one sequence -> [n, H, D].

    Only the tokens that some query sees are gathered: slots that were never written may hold NaN, and NaN
    times a weight of zero is still NaN.
    """
    count, heads, dim = q.shape
    size, groups = cache.block_size, cache.value.shape[1]
    stop = first + count
    start = 0 if window is None else max(0, first - window + 1)
    first_block = start // size
    ids = blocks[first_block : (stop + size - 1) // size]
    seen = slice(start - first_block * size, stop - first_block * size)
    key = cache.key[ids].permute(1, 2, 0, 3).flatten(2)[:, :, seen].to(torch.float32)
    value = cache.value[ids].transpose(0, 1).flatten(1, 2)[:, seen].to(torch.float32)

    # query heads that share a key head are rows of one matrix product: [G, H/G * n, D]
    rows = q.reshape(count, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    scores = (rows @ key * scale).view(groups, heads // groups, count, stop - start)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(first, stop)[:, None] - torch.arange(start, stop)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(torch.float32).view(groups, -1, 1, 1).expand(-1, -1, count, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed = weights.flatten(1, 2) @ value
    return mixed.view(groups, heads // groups, count, dim).permute(2, 0, 1, 3)
