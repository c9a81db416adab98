"""Arrays of bfloat16 and their way to torch and back; torch is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged_backend.kernels.array import BFLOAT16, bfloat16, dtype_name, equal, float32, is_float
from paged_backend.kernels.tensor import as_array, as_tensor


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)


def hard_floats() -> np.ndarray:
    """Values around every bfloat16: itself, halves that tie, and their neighbours; infinities and NaN among them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    return (upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1).view(np.float32)


def test_every_bfloat16_widens_as_in_torch():
    wide = float32(every_bfloat16())
    expected = as_tensor(every_bfloat16()).to(torch.float32).numpy()
    np.testing.assert_array_equal(wide.view(np.uint32), expected.view(np.uint32))


def test_floats_round_to_bfloat16_as_in_torch():
    values = hard_floats()
    ours, theirs = as_tensor(bfloat16(values)), torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


def test_rounding_a_bfloat16_changes_nothing():
    array = every_bfloat16()
    assert bfloat16(array) is array
    again = bfloat16(float32(array))
    numbers = ~np.isnan(float32(array))
    assert (again.view(np.uint16) == array.view(np.uint16))[numbers].all()


def test_numpy_does_not_calculate_with_the_bits():
    with pytest.raises(TypeError):
        every_bfloat16() + every_bfloat16()


def test_views_of_a_bfloat16_array_keep_their_dtype():
    matrix = every_bfloat16().reshape(256, 256)
    part = matrix[3::2, 4:].T
    assert dtype_name(part) == "bfloat16"
    np.testing.assert_array_equal(float32(part), as_tensor(matrix)[3::2, 4:].T.to(torch.float32).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_tensors_and_arrays_share_memory(dtype):
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    array = as_array(tensor)
    assert dtype_name(array) == str(dtype).removeprefix("torch.")
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
    array = bfloat16(np.array([1.0, -2.5], np.float32))
    assert equal(array, float32(array))
    assert not equal(array, np.array([1.0, -2.0], np.float32))
    assert not equal(array, float32(array)[None])
    assert not equal(np.array([np.nan]), np.array([np.nan]))
