"""KV memory on a device: how much there is, and a pool that grows as blocks are first used.

A device has no operating system that commits a page when it is touched. The pool therefore begins small and doubles:
tensor by tensor a larger one is allocated, filled from the old one and put in its place, so that beside the pool
there is never more than one old tensor. Copying costs less than twice the pool's bytes over an engine's life.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_backend.kernels.base import LayerCache

if TYPE_CHECKING:
    from paged_backend.kernels.base import Kernels
    from paged_backend.models.spec import DecoderSpec

_SHARE = 0.9
_FIRST_BLOCKS = 256
_FIRST_SHARE = 8  # at least an eighth of the limit: three doublings at most


def free_device_memory(device: str) -> int:
    """Bytes for KV: nine tenths of what is free once the weights are loaded; the rest is for activations and graphs."""
    torch.cuda.empty_cache()  # what loading has left in torch's own pool is free as well
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


class GrowingCache:
    """``caches`` of a model, one per layer, with room for ``held`` of at most ``limit`` blocks."""

    def __init__(
        self, kernels: Kernels, spec: DecoderSpec, limit: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.limit = limit
        self.held = min(limit, max(_FIRST_BLOCKS, limit // _FIRST_SHARE))
        self.caches = kernels.empty_cache(
            spec.num_layers, self.held, spec.num_kv_heads, spec.head_dim, block_size, dtype
        )

    def ensure(self, blocks: int) -> bool:
        """Make room for block ids below ``blocks``. True if the tensors have moved.

        Raises torch.OutOfMemoryError where the device has less free than when the limit was set; the pool then holds
        what it held before, and may be asked again.
        """
        if blocks <= self.held:
            return False
        wanted = min(max(blocks, 2 * self.held), self.limit)
        if blocks > wanted:
            raise ValueError(f"block {blocks - 1} is beyond the pool of {self.limit}")
        for i, cache in enumerate(
            self.caches
        ):  # one that has grown in an attempt that failed is left as it is
            self.caches[i] = cache = LayerCache(_grown(cache.key, wanted), cache.value)
            self.caches[i] = LayerCache(cache.key, _grown(cache.value, wanted))
        self.held = wanted
        return True


def _grown(tensor: Tensor, blocks: int) -> Tensor:
    if len(tensor) >= blocks:
        return tensor
    larger = tensor.new_empty(blocks, *tensor.shape[1:])
    larger[: len(tensor)] = tensor
    return larger
