"""Array: what weights and activations are on the CPU, a numpy array; and bfloat16, which numpy does not have.

A bfloat16 array is one of 16-bit numbers whose dtype says what they are: :data:`BFLOAT16`, a structure of one field. It
is sliced, reshaped, copied and mapped from a file like any other; numpy refuses to calculate with it, so that nobody
takes its bits for numbers.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SLICE = (
    1 << 16
)  # numbers compared at a time: an embedding is a gigabyte, and widened it would be two or more

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The upper half of a float32: sign, 8 bits of exponent, 7 of mantissa."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "int8": np.dtype(np.int8)}
"""Of keys and values, by name."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a number, by the name of its dtype: of those that activations, keys and values may have."""


_DATA = object.__basicsize__  # of an array object: its first field after Python's own, a pointer
_pointer_at = ctypes.c_void_p.from_address


def _address_by_field(array: Array) -> int:
    """Where the first element is, read from the array object itself (``PyArrayObject`` of numpy's C interface).

    An eighth of the time of ``array.ctypes.data``, which a step would spend a thousand times.
    """
    return _pointer_at(id(array) + _DATA).value or 0


def _address_by_interface(array: Array) -> int:
    return array.ctypes.data


def _fields_are_known() -> bool:
    """Whether objects lie in memory as CPython's do."""
    sample = np.zeros((3, 2), np.float32)
    return sys.implementation.name == "cpython" and all(
        _address_by_field(part) == part.ctypes.data for part in (sample, sample[1:], sample[:, 1])
    )


address = _address_by_field if _fields_are_known() else _address_by_interface
"""Where an array's first element is in memory."""


def dtype_name(array: Array) -> str:
    """``float32``, ``bfloat16``, ``int64``."""
    return "bfloat16" if array.dtype == BFLOAT16 else array.dtype.name


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


def bfloat16(array: Array) -> Array:
    """Floating point values rounded to the nearest bfloat16, halves to even; the array itself if it has that dtype."""
    if array.dtype == BFLOAT16:
        return array
    wide = np.ascontiguousarray(array, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype("<u2").view(BFLOAT16)


def equal(a: Array, b: Array) -> bool:
    """Whether shapes and values are the same, whatever the dtypes; NaN differs from itself. Ends at a difference."""
    if a.shape != b.shape:
        return False
    first, second = a.reshape(-1), b.reshape(-1)  # views, of contiguous arrays
    slices = (slice(start, start + _SLICE) for start in range(0, a.size, _SLICE))
    return all((float32(first[part]) == float32(second[part])).all() for part in slices)
