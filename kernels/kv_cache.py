"""KV cache: what the keys and values of a layer are kept as, described here and nowhere else.

A layer has a few arrays, its parts. Each begins with the number of blocks, so that block ``b`` of a cache is
``part[b]`` of every part of every layer: who copies blocks, gives them back or makes room for more goes through
``parts`` and need not know what they hold.

``key`` [num_blocks, G, D, block_size] (a token is a column, so that scores of a block are computed from contiguous
rows) and ``value`` [num_blocks, G, block_size, D] are both float32, bfloat16 or (on a GPU) float16, rounded to nearest
even when written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paged_backend.kernels.array import ITEMSIZE


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
        return (
            CachePart("key", (heads, dim, size), self.dtype),
            CachePart("value", (heads, size, dim), self.dtype),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * sum(part.block_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV cache of one layer; see the module for the layout."""

    key: Any
    value: Any

    @property
    def block_size(self) -> int:
        return self.value.shape[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts, in the order of ``CacheSpec.parts``."""
        return "key", "value"

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def map(self, change: Callable[[Any], Any]) -> LayerCache:
        """A cache of what ``change`` makes of each part."""
        return LayerCache(*map(change, self.parts))
