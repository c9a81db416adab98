"""Array: what weights and activations are on the CPU, a numpy array; and bfloat16, which numpy does not have.

A bfloat16 array is one of 16-bit numbers whose dtype says what they are: :data:`BFLOAT16`, a structure of one field. It
is sliced, reshaped, copied and mapped from a file like any other; numpy refuses to calculate with it, so that nobody
takes its bits for numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SLICE = (
    1 << 16
)  # numbers compared at a time: an embedding is a gigabyte, and widened it would be two or more

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The upper half of a float32: sign, 8 bits of exponent, 7 of mantissa."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its dtype: of those that activations, keys and values may have."""


def is_float(array: Array) -> bool:
    """Whether its values are floating point numbers, bfloat16 among them."""
    return array.dtype.kind == "f" or array.dtype == BFLOAT16


def float32(array: Array) -> Array:
    """The values as float32, which loses nothing of bfloat16 and float16; the array itself if it has that dtype."""
    if array.dtype != BFLOAT16:
        return array.astype(np.float32, copy=False)
    wide = array.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def equal(a: Array, b: Array) -> bool:
    """Whether shapes and values are the same, whatever the dtypes; NaN differs from itself. Ends at a difference."""
    if a.shape != b.shape:
        return False
    first, second = a.reshape(-1), b.reshape(-1)  # views, of contiguous arrays
    slices = (slice(start, start + _SLICE) for start in range(0, a.size, _SLICE))
    return all((float32(first[part]) == float32(second[part])).all() for part in slices)
