"""Between arrays and torch's tensors, sharing memory: for what runs on torch (Triton, modules of transformers)."""

from __future__ import annotations

import numpy as np
import torch

from paged_backend.kernels.array import BFLOAT16, Array


def tensor_dtype(name: str) -> torch.dtype:
    """``bfloat16`` -> ``torch.bfloat16``. Raises ValueError for a name that is no dtype of torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def as_tensor(array: Array) -> torch.Tensor:
    """The same memory as a tensor on the CPU. Writing to it is for those who own the array."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> Array:
    """The same memory as an array, of a tensor on the CPU; a copy of one on a device. Floats of 8 bits are widened."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.to(torch.float32)
    return tensor.numpy()
