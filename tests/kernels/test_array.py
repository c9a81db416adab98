"""Arrays of bfloat16 and their way to torch and back; torch is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged_backend.kernels.array import BFLOAT16, equal, float32, is_float
from paged_backend.kernels.tensor import as_array, as_tensor


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)


def test_every_bfloat16_widens_as_in_torch():
    wide = float32(every_bfloat16())
    expected = as_tensor(every_bfloat16()).to(torch.float32).numpy()
    np.testing.assert_array_equal(wide.view(np.uint32), expected.view(np.uint32))


def test_numpy_does_not_calculate_with_the_bits():
    with pytest.raises(TypeError):
        every_bfloat16() + every_bfloat16()


def test_views_of_a_bfloat16_array_keep_their_dtype():
    matrix = every_bfloat16().reshape(256, 256)
    part = matrix[3::2, 4:].T
    assert part.dtype == BFLOAT16
    np.testing.assert_array_equal(float32(part), as_tensor(matrix)[3::2, 4:].T.to(torch.float32).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_tensors_and_arrays_share_memory(dtype):
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    array = as_array(tensor)
    assert is_float(array) == dtype.is_floating_point
    tensor[1, 2] = 9
    back = as_tensor(array)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() == tensor.data_ptr()


def test_floats_of_eight_bits_keep_their_values():
    tensor = torch.randn(4, 5).to(torch.float8_e4m3fn)
    assert torch.equal(as_tensor(as_array(tensor)), tensor.to(torch.float32))


def test_equal_compares_values_across_dtypes():
    array = every_bfloat16()[:200].reshape(2, 100)
    assert equal(array, float32(array))
    assert not equal(array, float32(array)[:, :50])
    assert not equal(array, float32(array).reshape(100, 2))
    assert not equal(np.array([np.nan]), np.array([np.nan]))


@pytest.mark.parametrize("place", [0, 1 << 16, 200_000 - 1])
def test_equal_looks_at_every_value(place: int):
    array = np.arange(200_000, dtype=np.float32).reshape(400, 500)
    other = array.copy()
    assert equal(array, other)
    other.reshape(-1)[place] += 1
    assert not equal(array, other)
