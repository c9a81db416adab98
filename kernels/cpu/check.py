"""What the C kernels are handed: every pointer comes from an array whose dtype, device, layout and size were looked at.

C writes where it is told to. An array of another dtype is not a wrong result there but a corrupted heap, so this is
looked at in every call: identity of a dtype, two flags and the sizes, a few hundred nanoseconds. What stays the same
for a whole step (the plan) or for an engine's life (weights, caches) is looked at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs, LayerCache

_FLOAT, _BF16, _LONG, _INT = torch.float32, torch.bfloat16, torch.int64, torch.int32
_SUB_BLOCK = 16  # tokens that attention takes from a block at a time


def floats(name: str, x: Tensor) -> int:
    """Address of a contiguous float32 array on the CPU. Raises TypeError or ValueError naming it."""
    if x.dtype is _FLOAT and x.is_cpu and x.is_contiguous():
        return x.data_ptr()
    raise refusal(name, x, _FLOAT)


def whole_numbers(name: str, x: Tensor, dtype: torch.dtype = _LONG) -> int:
    """Address of a contiguous integer array on the CPU. Raises TypeError or ValueError naming it."""
    if x.dtype is dtype and x.is_cpu and x.is_contiguous():
        return x.data_ptr()
    raise refusal(name, x, dtype)


def contiguous(name: str, x: Tensor) -> Tensor:
    """float32 on the CPU, copied together if it is not. Raises TypeError naming it."""
    if x.dtype is _FLOAT and x.is_cpu:
        return x.contiguous()
    raise refusal(name, x, _FLOAT)


def multiplier(name: str, x: Tensor, size: int) -> int:
    """Address of float32 [size]."""
    if x.numel() != size:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not [{size}]")
    return floats(name, x)


def of_heads(name: str, x: Tensor) -> tuple[int, ...]:
    """The shape [T, heads, D] of an array."""
    shape = x.shape
    if len(shape) != 3:
        raise ValueError(f"{name} must be [T, heads, D], got {tuple(shape)}")
    return shape


def token_stride(name: str, x: Tensor, heads: int, d: int) -> int:
    """Distance of tokens in a float32 [T, heads, d] view whose last two dimensions are contiguous."""
    if x.dtype is not _FLOAT or not x.is_cpu:
        raise refusal(name, x, _FLOAT)
    token, head, element = x.stride()
    if element != 1 or (head != d and heads > 1):
        raise ValueError(
            f"the heads of {name} must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}"
        )
    return token


def refusal(name: str, x: Tensor, dtype: torch.dtype) -> Exception:
    """The error of an array that is not a contiguous one of ``dtype`` on the CPU."""
    if x.dtype is not dtype or not x.is_cpu:
        wanted = str(dtype).removeprefix("torch.")
        return TypeError(
            f"{name} must be {wanted} on the CPU, got {str(x.dtype).removeprefix('torch.')} on {x.device}"
        )
    return ValueError(
        f"{name} must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}: call contiguous()"
    )


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Addresses and sizes of one layer's keys [blocks, heads, d, size] and values [blocks, heads, size, d]."""

    key: int
    value: int
    blocks: int
    heads: int
    d: int
    size: int
    bf16: bool


@dataclass(frozen=True, slots=True)
class CheckedCache(LayerCache):
    """A cache that was looked at when it was made."""

    layout: CacheLayout


def cache_layout(cache: LayerCache) -> CacheLayout:
    """Sizes of a cache, looked at unless ``CpuKernels.empty_cache`` has done so. Raises TypeError or ValueError."""
    if type(cache) is CheckedCache:
        return cache.layout
    key, value = cache.key, cache.value
    if key.dtype not in (_FLOAT, _BF16) or value.dtype is not key.dtype:
        raise TypeError(f"the KV cache must be float32 or bfloat16, got {key.dtype} and {value.dtype}")
    if key.dim() != 4:
        raise ValueError(f"the keys of a cache are [blocks, heads, D, block_size], got {tuple(key.shape)}")
    blocks, heads, d, size = key.shape
    if value.shape != (blocks, heads, size, d):
        raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} are of different caches")
    if size > _SUB_BLOCK and size % _SUB_BLOCK:
        raise ValueError(f"blocks hold up to {_SUB_BLOCK} tokens or a multiple of that, got {size}")
    for name, part in (("cache.key", key), ("cache.value", value)):
        if not part.is_cpu or not part.is_contiguous():
            raise refusal(name, part, key.dtype)
    return CacheLayout(key.data_ptr(), value.data_ptr(), blocks, heads, d, size, key.dtype is _BF16)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step's arrays ask of a cache. longest: context. highest: block id; a negative one counts as huge."""

    tokens: int
    longest: int
    highest: int
    width: int

    def fit(self, layout: CacheLayout) -> None:
        """Raise ValueError if the tables name a block that the cache does not have, or too few of them."""
        if self.highest >= layout.blocks:
            raise ValueError(f"block_table names a block outside of the cache of {layout.blocks}")
        if self.longest > self.width * layout.size:
            raise ValueError(
                f"block_table has {self.width} blocks of {layout.size} tokens for a context of {self.longest}"
            )


def step_sizes(inputs: AttentionInputs) -> StepSizes:
    """Look at the arrays of a step. Raises TypeError or ValueError naming the one that is wrong."""
    start, lens, table = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
    for name, x in (("query_start_loc", start), ("seq_lens", lens), ("block_table", table)):
        whole_numbers(name, x, _INT)
    whole_numbers("slot_mapping", inputs.slot_mapping)
    count = lens.shape[0]
    if start.shape != (count + 1,) or table.dim() != 2 or table.shape[0] != count:
        raise ValueError(
            f"of {count} sequences query_start_loc is [{count + 1}] and block_table [{count}, B], got "
            f"{tuple(start.shape)} and {tuple(table.shape)}"
        )
    bounds, contexts = start.numpy(), lens.numpy()
    counts = bounds[1:] - bounds[:-1]
    tokens = int(bounds[-1])
    if bounds[0] != 0 or (counts < 0).any() or (counts > contexts).any():
        raise ValueError(
            "query_start_loc must ascend from 0, with no more queries than tokens in any sequence (seq_lens)"
        )
    if inputs.slot_mapping.shape != (tokens,):
        raise ValueError(f"slot_mapping must be [{tokens}], got {tuple(inputs.slot_mapping.shape)}")
    longest = int(contexts.max()) if count else 0
    highest = int(table.numpy().view(np.uint32).max()) if table.numel() else -1
    return StepSizes(tokens, longest, highest, table.shape[1])
