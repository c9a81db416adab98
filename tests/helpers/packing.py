"""Weights that a test made with torch, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paged_backend.kernels.base import Kernels
from paged_backend.kernels.tensor import as_array


def pack(
    kernels: Kernels,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    dtype: str = "auto",
) -> Any:
    """``kernels.pack_linear`` of tensors."""
    given = None if biases is None else [None if bias is None else as_array(bias) for bias in biases]
    return kernels.pack_linear([as_array(weight) for weight in weights], given, dtype)
