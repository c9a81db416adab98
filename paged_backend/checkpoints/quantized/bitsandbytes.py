"""bitsandbytes: int8 with a scale for each output, and 4-bit codes of a table (nf4, fp4)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paged_backend.checkpoints.quantized.parts import Found, Parts
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.affine import Affine
from paged_backend.kernels.float_codes import Float4

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_FOUR_BITS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_NO_STATE = "{title}: {name} is no description of 4-bit weights ({error})"


def bitsandbytes(settings: Mapping[str, Any], source: str) -> Callable[[Parts], Found | None]:
    """Reader of ``quant_method: bitsandbytes``."""
    return _find


def _find(parts: Parts) -> Found | None:
    if "SCB" in parts:
        shape = parts.matrix("weight", "I8")
        return Found(shape, partial(_read_int8, parts), ("weight", "SCB", "weight_format"))
    state = next((name for name in _STATES if name in parts), None)
    if state is None:
        return None
    told = _state(parts, state)
    return Found(told["shape"], partial(_read_four_bits, parts, told), ("weight", state, *_FOUR_BITS))


def _read_int8(parts: Parts) -> Affine:
    if "weight_format" in parts and parts.array("weight_format").any():
        raise UnsupportedModelError(
            f"{parts.title} is tiled for a GPU (weight_format); only row-major int8 is supported"
        )
    codes, largest = parts.array("weight", "I8"), parts.array("SCB", "F32").reshape(-1, 1)
    return Affine(codes, largest * np.float32(1 / 127), None, 8, None, parts.title)


def _state(parts: Parts, name: str) -> dict[str, Any]:
    """The JSON that a tensor of bytes holds, with ``shape`` and ``blocksize`` looked at."""
    try:
        told = json.loads(parts.array(name, "U8").tobytes())
        n, k = told["shape"]
        sizes = n, k, told["blocksize"], *([told["nested_blocksize"]] if "nested_blocksize" in told else [])
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError("its sizes are no positive numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(_NO_STATE.format(title=parts.title, name=name, error=error)) from error
    return {**told, "shape": (n, k)}


def _read_four_bits(parts: Parts, told: Mapping[str, Any]) -> Float4:
    n, k = told["shape"]
    size = told["blocksize"]
    packed = parts.array("weight", "U8").reshape(-1)
    largest = parts.array("weight.absmax", "F32", "U8").reshape(-1)
    table = parts.array("weight.quant_map", "F32")
    if parts.dtype("weight.absmax") == "U8":  # its scales are codes of 8 bits themselves
        runs = np.arange(len(largest)) // told.get("nested_blocksize", 256)
        nested = parts.array("weight.nested_absmax", "F32")
        if not len(largest) or runs[-1] >= len(nested):
            raise ModelLoadError(f"{parts.title}: nested_absmax has {len(nested)} values for {len(largest)}")
        steps = parts.array("weight.nested_quant_map", "F32")[largest]
        largest = steps * nested[runs] + np.float32(told.get("nested_offset", 0.0))
    if table.shape != (16,) or k % 2 or len(packed) * 2 != n * k or len(largest) != -(-n * k // size):
        raise ModelLoadError(
            f"{parts.title}: {len(packed)} bytes and {len(largest)} scales are no matrix {n} x {k} in blocks of {size}"
        )
    # blocks follow the rows laid end to end, so one may begin in a row and end in the next: take what divides both
    group = math.gcd(k, size)
    scales = largest.repeat(size // group)[: n * k // group].reshape(n, k // group)
    codes = (packed >> 4 | packed << 4).reshape(n, k // 2)  # the first of two inputs is in the high half
    return Float4(codes, scales, table, parts.title)
