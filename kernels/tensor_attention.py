"""TensorAttention: the attention of any kernels for modules of torch, which hold tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs, DeviceArray, Kernels
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.tensor import as_array, as_tensor, tensor_dtype


class TensorAttention:
    """Writes tensors to the pages of ``kernels`` and attends over them. Batches and caches stay in their own arrays.

    device, dtype: where queries, keys and values are to be, and as what.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.device, self.dtype = torch.device(kernels.device), tensor_dtype(kernels.dtype)

    def tensor(self, array: DeviceArray) -> Tensor:
        """An array of the kernels as a tensor; the same memory."""
        return as_tensor(array) if self.kernels.uses_numpy else array

    def array(self, tensor: Tensor) -> DeviceArray:
        """A tensor as an array of the kernels; the same memory."""
        return as_array(tensor) if self.kernels.uses_numpy else tensor

    def plan(self, inputs: AttentionInputs) -> Any:
        """As ``Kernels.plan``."""
        return self.kernels.plan(inputs)

    def write(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: DeviceArray) -> None:
        """Write k and v [T, G, D] of queries q [T, H, D] to their slots; what was to be rotated is rotated already."""
        no_rotation = self.kernels.to_device(np.empty((len(q), 0), np.float32))
        heads = (self.array(x) for x in (q, k, v))
        self.kernels.rotary_and_cache(*heads, no_rotation, no_rotation, cache, slot_mapping)

    def attend(
        self,
        plan: Any,
        q: Tensor,
        cache: LayerCache,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As ``Kernels.paged_attention``."""
        given = None if sinks is None else self.array(sinks)
        return self.tensor(
            self.kernels.paged_attention(plan, self.array(q), cache, scale, window, softcap, given)
        )
