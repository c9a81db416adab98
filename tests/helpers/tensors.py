"""Kernels on numpy arrays, given tensors, whose memory they share: what is changed in place is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paged_backend.kernels.base import AttentionInputs, Kernels
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.tensor import as_array, as_tensor


def arrays(value: Any) -> Any:
    """Tensors on the CPU as arrays, also those of caches and of a step's inputs; everything else as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return as_array(value)
    if isinstance(value, LayerCache):
        return value if isinstance(value.key, np.ndarray) else value.map(arrays)
    if isinstance(value, AttentionInputs):
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        return AttentionInputs(*(arrays(getattr(value, name)) for name in names))
    if isinstance(value, list):
        return [arrays(part) for part in value]
    return value


def tensors(value: Any) -> Any:
    """The way back, of arrays and caches."""
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    if isinstance(value, LayerCache):
        return value.map(tensors)
    if isinstance(value, list):
        return [tensors(part) for part in value]
    return value


class OnTensors:
    """``kernels`` with tensors for arguments and results."""

    def __init__(self, kernels: Kernels) -> None:
        object.__setattr__(self, "kernels", kernels)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return as_array(tensor)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.kernels, name)
        if not callable(member):
            return member

        def call(*given: Any, **named: Any) -> Any:
            return tensors(
                member(*map(arrays, given), **{key: arrays(value) for key, value in named.items()})
            )

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.kernels, name, value)
