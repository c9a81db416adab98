"""KV memory on a device: how much there is, and a pool that grows as blocks are first used.

A device has no operating system that commits a page when it is touched. The pool therefore begins small and doubles:
tensor by tensor a larger one is allocated, filled from the old one and put in its place, so that beside the pool
there is never more than one old tensor. Copying costs less than twice the pool's bytes over an engine's life.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_backend.errors import BackendUnavailableError

if TYPE_CHECKING:
    from paged_backend.kernels.base import Kernels
    from paged_backend.models.spec import DecoderSpec

_SHARE = 0.9
_WORK_SPACES = 1 << 30
_FIRST_BLOCKS = 256
_FIRST_SHARE = 8  # at least an eighth of the limit: three doublings at most


def free_device_memory(device: str, step_bytes: int) -> int:
    """Bytes for KV: nine tenths of what is free once the weights are loaded, less if a step needs more than the rest.

    step_bytes: see :func:`step_memory`. A GiB comes on top of it, for graphs and the work spaces of libraries.
    Raises BackendUnavailableError where nothing is left.
    """
    torch.cuda.empty_cache()  # what loading has left in torch's own pool is free as well
    free = torch.cuda.mem_get_info(device)[0]
    left = free - max(int(free * (1 - _SHARE)), step_bytes + _WORK_SPACES)
    if left <= 0:
        raise BackendUnavailableError(
            f"the weights leave {free >> 20} MiB of the GPU free and a step needs {step_bytes >> 20} MiB beside the KV "
            "cache: lower max_num_batched_tokens or max_num_seqs, or use quantization"
        )
    return left


def step_memory(spec: DecoderSpec, tokens: int, rows: int, itemsize: int) -> int:
    """Bytes of a step's activations at their peak: ``tokens`` in one MLP, the logits of ``rows`` twice in float32.

    itemsize: bytes of an activation.
    """
    mlp = spec.intermediate_size or 4 * spec.hidden_size
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return tokens * (3 * mlp + heads + 4 * spec.hidden_size) * itemsize + 2 * rows * spec.vocab_size * 4


class GrowingCache:
    """``caches`` of a model, one per layer, with room for ``held`` of at most ``limit`` blocks."""

    def __init__(self, kernels: Kernels, spec: DecoderSpec, limit: int, block_size: int, dtype: str) -> None:
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
        for i, cache in enumerate(self.caches):
            for name in cache.names:  # one that has grown in an attempt that failed is left as it is
                grown = _grown(getattr(cache, name), wanted)
                self.caches[i] = cache = replace(cache, **{name: grown})
        self.held = wanted
        return True


def _grown(tensor: Tensor, blocks: int) -> Tensor:
    if len(tensor) >= blocks:
        return tensor
    larger = tensor.new_empty(blocks, *tensor.shape[1:])
    larger[: len(tensor)] = tensor
    return larger
