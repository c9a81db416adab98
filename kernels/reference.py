"""ReferenceKernels: every operation in plain numpy; oracle of the other backends, fallback everywhere.

Like them it gives a token the same bits whatever is in the batch, and reads no process-wide setting: products have
fixed shapes (see ``row_products``), and functions are numpy's, or put together from what is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_backend.kernels.array import BFLOAT16, Array, bfloat16, float32
from paged_backend.kernels.base import AttentionInputs, Kernels, PackedLinear
from paged_backend.kernels.kv_cache import LayerCache, quantize
from paged_backend.kernels.row_products import LANES, from_lanes, row_linear, to_lanes
from paged_backend.kernels.weights import Weight, to_dense

_STORAGE = {"auto": float32, "float32": float32, "bfloat16": bfloat16}
_ERF = np.frompyfunc(math.erf, 1, 1)

# Queries scored at once; bounds the score matrix of a long prefill at H * tile * context floats.
_QUERY_TILE = 128
_KEYS = 32  # tokens of a run of the context


class ReferenceLinear(PackedLinear):
    """weight [N, K] float32 or bfloat16, bias [N] float32 or None."""

    def __init__(self, weight: Array, bias: Array | None) -> None:
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
    blocks: Array


class ReferenceKernels(Kernels):
    """Plain numpy, fp32 math, no state. Weights are held as float32, or bfloat16 if asked for."""

    name = "reference"

    def _pack(self, weights: Sequence[Weight], bias: Array | None, dtype: str) -> ReferenceLinear:
        if dtype in ("int8", "int4"):
            raise ValueError("int8 and int4 weights need the C kernels; the reference kernels have none")
        if dtype not in _STORAGE:
            raise ValueError(f"dtype must be one of {', '.join(_STORAGE)}, got {dtype!r}")
        # this copies even a single matrix: a view of a memory-mapped file would die with the file
        return ReferenceLinear(np.concatenate([_STORAGE[dtype](to_dense(w)) for w in weights]), bias)

    def linear(self, x: Array, weight: PackedLinear) -> Array:
        packed = _unpack(weight)
        return row_linear(x, float32(packed.weight), packed.bias)

    def logits(self, x: Array, head: PackedLinear, softcap: float | None = None) -> Array:
        scores = self.linear(x, head)
        with np.errstate(all="ignore"):
            return scores if softcap is None else np.tanh(scores / np.float32(softcap)) * np.float32(softcap)

    def embedding(self, ids: Array, table: PackedLinear) -> Array:
        return float32(_unpack(table).weight[ids])

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        rows = np.ascontiguousarray(x)
        with np.errstate(all="ignore"):
            mean = np.square(rows).sum(-1, keepdims=True) / np.float32(rows.shape[-1])
            return rows * (1 / np.sqrt(mean + np.float32(eps))) * weight

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary_and_cache(
        self,
        q: Array,
        k: Array,
        v: Array,
        cos: Array,
        sin: Array,
        cache: LayerCache,
        slot_mapping: Array,
    ) -> None:
        half = cos.shape[-1]
        cos, sin = cos[:, None], sin[:, None]
        for x in (q, k):
            low, high = x[..., :half], x[..., half : 2 * half]
            with np.errstate(all="ignore"):
                rotated = low * cos - high * sin
                high[:] = high * cos + low * sin
            low[:] = rotated
        block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
        if cache.key_scale is not None:
            k, cache.key_scale[block, :, offset] = quantize(k)
            v, cache.value_scale[block, :, offset] = quantize(v)
        kept = bfloat16 if cache.key.dtype == BFLOAT16 else np.asarray
        cache.key[block, :, :, offset] = kept(k)
        cache.value[block, :, offset] = kept(v)

    def plan(self, inputs: AttentionInputs) -> list[_Query]:
        bounds, lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        return [
            _Query(start, stop, seq_len - (stop - start), seq_len, row)
            for start, stop, seq_len, row in zip(bounds[:-1], bounds[1:], lens, inputs.block_table)
        ]

    def paged_attention(
        self,
        plan: list[_Query],
        q: Array,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        tokens, heads, dim = q.shape
        out = np.empty((tokens, heads * dim), np.float32)
        with np.errstate(all="ignore"):
            for query in plan:
                for start in range(query.start, query.stop, _QUERY_TILE):
                    stop = min(start + _QUERY_TILE, query.stop)
                    first = query.first + start - query.start
                    rows = q[start:stop]
                    result = _attend(rows, first, query.blocks, cache, scale, window, softcap, sinks)
                    out[start:stop] = result.reshape(stop - start, heads * dim)
        return out

    def act_and_mul(self, x: Array, activation: str) -> Array:
        # from exp, tanh and erf, whose values do not depend on where in an array they stand; those of silu do
        gate, up = np.split(x, 2, axis=-1)
        with np.errstate(all="ignore"):
            if activation == "silu":
                return gate / (1 + np.exp(-gate)) * up
            if activation == "gelu":
                erf = _ERF(gate * np.float32(math.sqrt(0.5))).astype(np.float32)
                return np.float32(0.5) * gate * (1 + erf) * up
            if activation == "gelu_tanh":
                inner = np.float32(math.sqrt(2 / math.pi)) * (
                    gate + np.float32(0.044715) * gate * gate * gate
                )
                return np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
        raise ValueError(f"activation must be silu, gelu or gelu_tanh, got {activation!r}")

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, destination = (np.array(ids, np.int64) for ids in zip(*pairs))
        for cache in caches:
            for part in cache.parts:
                part[destination] = part[source]


def _unpack(weight: PackedLinear) -> ReferenceLinear:
    if not isinstance(weight, ReferenceLinear):
        raise TypeError(f"weights were packed by another backend ({type(weight).__name__}); pack them here")
    return weight


def _attend(
    q: Array,
    first: int,
    blocks: Array,
    cache: LayerCache,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Array | None,
) -> Array:
    """Attention of queries q [n, H, D] at positions first .. first + n - 1 of one sequence -> [n, H, D].

    The context is taken in runs of _KEYS tokens at absolute positions, whose products all have one shape; a token that
    a query does not see has weight 0 there. So a query's result does not depend on the chunk that it came in. Slots
    that no query sees are not read: they may hold NaN, and NaN times a weight of zero is still NaN.
    """
    count, heads, dim = q.shape
    groups = cache.value.shape[1]
    stop = first + count
    start = 0 if window is None else max(0, first - window + 1)

    # query heads that share a key head are rows of the same products: [G, tiles, D, lanes]
    share = heads // groups
    lanes = to_lanes(q.reshape(count, groups, share, dim).transpose(1, 0, 2, 3).reshape(groups, -1, dim))
    shape = (1, lanes.shape[1], 1, LANES)
    rows = np.arange(lanes.shape[1] * LANES)
    position = (first + rows // share).reshape(shape)

    # all runs at once: [runs, G, tiles, _KEYS, lanes]
    runs = range(start // _KEYS * _KEYS, stop, _KEYS)
    keys, values = _gather(cache, blocks, start, stop, runs)
    scores = (keys @ lanes) * np.float32(scale)
    if softcap is not None:
        scores = np.tanh(scores / np.float32(softcap)) * np.float32(softcap)
    distance = position - np.arange(runs.start, runs.start + len(runs) * _KEYS).reshape(-1, 1, 1, _KEYS, 1)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = np.where(hidden, np.float32(-np.inf), scores)

    highest = scores.max((0, 3), keepdims=True)[0]
    total = np.zeros(highest.shape, np.float32)
    if sinks is not None:
        by_row = float32(sinks).reshape(groups, share)[:, rows % share]
        sink = by_row.reshape(groups, *shape[1:])
        highest = np.maximum(highest, sink)
        total += np.exp(sink - highest)
    weights = np.exp(scores - highest)
    mixed = np.zeros((groups, lanes.shape[1], dim, LANES), np.float32)
    for sums, mixture in zip(weights.sum(-2, keepdims=True), values @ weights):
        total += sums
        mixed += mixture
    result = from_lanes(mixed / total, count * share)
    return result.reshape(groups, count, share, dim).transpose(1, 0, 2, 3)


def _gather(cache: LayerCache, blocks: Array, start: int, stop: int, runs: range) -> tuple[Array, Array]:
    """Keys [runs, G, 1, _KEYS, D] and values [runs, G, 1, D, _KEYS], zeros but for tokens start .. stop - 1."""
    size, groups, dim = cache.block_size, cache.value.shape[1], cache.value.shape[3]
    first_block = start // size
    ids = blocks[first_block : -(-stop // size)]
    seen = slice(start - first_block * size, stop - first_block * size)
    place = slice(start - runs.start, stop - runs.start)
    gathered = []
    for part, scale in ((cache.key.swapaxes(2, 3), cache.key_scale), (cache.value, cache.value_scale)):
        tokens = np.zeros((len(runs) * _KEYS, groups, dim), np.float32)
        tokens[place] = float32(part[ids].swapaxes(1, 2).reshape(-1, groups, dim)[seen])
        if scale is not None:  # exact: 7 bits by 8
            tokens[place] *= float32(scale[ids].swapaxes(1, 2).reshape(-1, groups, 1)[seen])
        gathered.append(tokens.reshape(len(runs), 1, _KEYS, groups, dim))
    keys, values = gathered
    return (
        np.ascontiguousarray(keys.transpose(0, 3, 1, 2, 4)),
        np.ascontiguousarray(values.transpose(0, 3, 1, 4, 2)),
    )
