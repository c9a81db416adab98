"""KV cache: what the keys and values of a layer are kept as, described here and nowhere else.

A layer has a few arrays, its parts. Each begins with the number of blocks, so that block ``b`` of a cache is
``part[b]`` of every part of every layer: who copies blocks, gives them back or makes room for more goes through
``parts`` and need not know what they hold.

``key`` [num_blocks, G, D, block_size] (a token is a column, so that scores of a block are computed from contiguous
rows) and ``value`` [num_blocks, G, block_size, D] are both float32, bfloat16 or (on a GPU) float16, rounded to nearest
even when written.

With int8 each token and head has codes of 8 bits for its key and for its value, and a scale for each: ``key_scale`` and
``value_scale`` bfloat16 [num_blocks, G, block_size]. Codes and scale follow from the token's own numbers (see
:func:`quantize`), so that it is kept as the same bits in whatever chunk or batch it comes, and however often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.kernels.array import BFLOAT16, ITEMSIZE, Array


@dataclass(frozen=True, slots=True)
class CachePart:
    """One array of a layer. shape: of a block. dtype: its name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Sizes of a model's KV cache but for the number of blocks. dtype: of keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """Of a layer, in the order of :class:`LayerCache`."""
        heads, dim, size = self.num_kv_heads, self.head_dim, self.block_size
        numbers = (
            CachePart("key", (heads, dim, size), self.dtype),
            CachePart("value", (heads, size, dim), self.dtype),
        )
        if self.dtype != "int8":
            return numbers
        scales = (CachePart(f"{part.name}_scale", (heads, size), "bfloat16") for part in numbers)
        return *numbers, *scales

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * sum(part.block_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer; see the module for the layout."""

    key: Any
    value: Any
    key_scale: Any = None
    value_scale: Any = None

    @property
    def block_size(self) -> int:
        return self.value.shape[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts, in the order of ``CacheSpec.parts``."""
        names = ("key", "value", "key_scale", "value_scale")
        return names if self.key_scale is not None else names[:2]

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def map(self, change: Callable[[Any], Any]) -> LayerCache:
        """A cache of what ``change`` makes of each part."""
        return LayerCache(*map(change, self.parts))


def quantize(x: Array) -> tuple[Array, Array]:
    """float32 [..., D] as codes int8 [..., D] and scales bfloat16 [...], whose product is within half a scale of x.

    A scale is a 127th of the largest element, rounded up to a bfloat16 number; that of numbers which are not all finite
    is NaN, with codes of 0.
    """
    with np.errstate(all="ignore"):
        largest = np.abs(x).max(-1)
        bits = np.ascontiguousarray(largest / np.float32(127)).view(np.uint32)
        bits = np.where(np.isfinite(largest), (bits + np.uint32(0xFFFF)) >> 16, np.uint32(0x7FC0))
        step = (bits << 16).view(np.float32)[..., None]
        codes = np.where(step > 0, np.rint(x / np.where(step > 0, step, 1)), 0)
    return codes.astype(np.int8), bits.astype("<u2").view(BFLOAT16)
