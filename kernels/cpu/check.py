"""What the C kernels are handed: every pointer comes from an array whose dtype, device, layout and size were looked at.

C writes where it is told to. An array of another dtype is not a wrong result there but a corrupted heap, so this is
looked at in every call: identity of a dtype, a flag and the sizes, a few hundred nanoseconds. What stays the same
for a whole step (the plan) or for an engine's life (weights, caches) is looked at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_backend.kernels.array import DTYPES, Array, address, dtype_name
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import CacheSpec, LayerCache

_FLOAT, _LONG, _INT = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.int32)
_SUB_BLOCK = 16  # tokens that attention takes from a block at a time


def floats(name: str, x: Array) -> int:
    """Address of a contiguous float32 array. Raises TypeError or ValueError naming it."""
    if type(x) is np.ndarray and x.dtype is _FLOAT and x.flags.c_contiguous:
        return address(x)
    return address(_contiguous(name, x, _FLOAT))


def changed(name: str, x: Array) -> int:
    """:func:`floats` of an array that C writes to."""
    pointer = floats(name, x)
    writable(name, x)
    return pointer


def writable(name: str, x: Array) -> None:
    """Raise ValueError for an array that must not be written to, such as one mapped from a file."""
    if not x.flags.writeable:
        raise ValueError(f"{name} is changed in place and cannot be written to")


def whole_numbers(name: str, x: Array, dtype: np.dtype[Any] = _LONG) -> int:
    """Address of a contiguous integer array. Raises TypeError or ValueError naming it."""
    if type(x) is np.ndarray and x.dtype is dtype and x.flags.c_contiguous:
        return address(x)
    return address(_contiguous(name, x, dtype))


def contiguous(name: str, x: Array) -> Array:
    """float32, copied together if it is not. Raises TypeError naming it."""
    if type(x) is np.ndarray and x.dtype is _FLOAT and x.flags.c_contiguous:
        return x
    return np.ascontiguousarray(_of_dtype(name, x, _FLOAT))


def multiplier(name: str, x: Array, size: int) -> int:
    """Address of float32 [size]."""
    pointer = floats(name, x)
    if x.size != size:
        raise ValueError(f"{name} has shape {x.shape}, not [{size}]")
    return pointer


def of_heads(name: str, x: Array) -> tuple[int, ...]:
    """The shape [T, heads, D] of an array of float32."""
    if type(x) is not np.ndarray or x.dtype is not _FLOAT:
        _of_dtype(name, x, _FLOAT)
    shape = x.shape
    if len(shape) != 3:
        raise ValueError(f"{name} must be [T, heads, D], got {shape}")
    return shape


def token_stride(name: str, x: Array, heads: int, d: int) -> int:
    """Floats between tokens of a [T, heads, d] view (:func:`of_heads`) whose last two dimensions are contiguous."""
    token, head, element = x.strides
    if element != 4 or (head != 4 * d and heads > 1) or token % 4:
        raise ValueError(
            f"the heads of {name} must be contiguous, got strides {x.strides} for shape {x.shape}"
        )
    return token // 4


def _of_dtype(name: str, x: Array, dtype: np.dtype[Any]) -> Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be {dtype.name} in a numpy array, got {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype.name}, got {dtype_name(x)}")
    return x


def _contiguous(name: str, x: Array, dtype: np.dtype[Any]) -> Array:
    """What the fast checks did not know: an array of another class, or the error."""
    if not _of_dtype(name, x, dtype).flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous, got strides {x.strides} for shape {x.shape}: use numpy.ascontiguousarray"
        )
    return x


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Addresses and sizes of one layer's cache.

    itemsize: of keys and values. parts: address of each part and bytes of a block of it.
    """

    key: int
    value: int
    key_scale: int | None
    value_scale: int | None
    blocks: int
    heads: int
    d: int
    size: int
    itemsize: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CheckedCache(LayerCache):
    """A cache that was looked at when it was made."""

    layout: CacheLayout = field(kw_only=True)


def cache_layout(cache: LayerCache) -> CacheLayout:
    """Sizes of a cache, looked at unless ``CpuKernels.empty_cache`` has done so. Raises TypeError or ValueError."""
    if type(cache) is CheckedCache:
        return cache.layout
    kinds = [dtype_name(p) if isinstance(p, np.ndarray) else type(p).__name__ for p in cache.parts]
    if kinds[0] not in DTYPES:
        raise TypeError(f"a KV cache is of arrays of {', '.join(DTYPES)}, got {' and '.join(kinds)}")
    if cache.key.ndim != 4:
        raise ValueError(f"the keys of a cache are [blocks, heads, D, block_size], got {cache.key.shape}")
    blocks, heads, d, size = cache.key.shape
    wanted = CacheSpec(1, heads, d, size, kinds[0]).parts
    if kinds != [part.dtype for part in wanted]:
        raise TypeError(
            f"a KV cache of {kinds[0]} is of arrays of {' and '.join(part.dtype for part in wanted)}, "
            f"got {' and '.join(kinds)}"
        )
    for part, array in zip(wanted, cache.parts):
        if array.shape != (blocks, *part.shape):
            raise ValueError(f"keys {cache.key.shape} and {part.name} {array.shape} are of different caches")
    if size > _SUB_BLOCK and size % _SUB_BLOCK:
        raise ValueError(f"blocks hold up to {_SUB_BLOCK} tokens or a multiple of that, got {size}")
    for part, array in zip(wanted, cache.parts):
        name = f"cache.{part.name}"
        writable(name, _contiguous(name, array, DTYPES[part.dtype]))
    scales = [None if part is None else address(part) for part in (cache.key_scale, cache.value_scale)]
    parts = tuple((address(array), part.block_bytes) for part, array in zip(wanted, cache.parts))
    return CacheLayout(
        address(cache.key), address(cache.value), *scales, blocks, heads, d, size, cache.key.itemsize, parts
    )


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
    if start.shape != (count + 1,) or table.ndim != 2 or table.shape[0] != count:
        raise ValueError(
            f"of {count} sequences query_start_loc is [{count + 1}] and block_table [{count}, B], got "
            f"{start.shape} and {table.shape}"
        )
    counts = start[1:] - start[:-1]
    tokens = int(start[-1])
    if start[0] != 0 or (counts < 0).any() or (counts > lens).any():
        raise ValueError(
            "query_start_loc must ascend from 0, with no more queries than tokens in any sequence (seq_lens)"
        )
    if inputs.slot_mapping.shape != (tokens,):
        raise ValueError(f"slot_mapping must be [{tokens}], got {inputs.slot_mapping.shape}")
    longest = int(lens.max()) if count else 0
    highest = int(table.view(np.uint32).max()) if table.size else -1
    return StepSizes(tokens, longest, highest, table.shape[1])
