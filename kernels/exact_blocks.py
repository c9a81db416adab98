"""Quantised weights of other formats as blocks of GGML's, where these hold exactly the same values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paged_backend.kernels.affine import Affine
from paged_backend.kernels.array import Array, float32
from paged_backend.kernels.float_codes import E2M1, Float4
from paged_backend.kernels.ggml import GGML_TYPES, GGMLType
from paged_backend.kernels.quantized import QuantizedWeight
from paged_backend.kernels.weights import GGMLBlocks

_BLOCK = 32  # values of a block, in each of the formats used here
_SLICE = 1 << 20  # codes repacked at a time

_BY_NAME = {type_.name: type_ for type_ in GGML_TYPES.values()}


def exact_blocks(weight: QuantizedWeight) -> GGMLBlocks | None:
    """The same matrix in blocks, its values equal bit for bit (but for the sign of zeros); None if there are none.

    Groups are whole blocks, whose scale is a float16 number or, for MXFP4, a power of two. A zero point becomes part of
    the codes, which may take a bit more then: 4 bits with zero points are Q5_0.
    """
    if isinstance(weight, GGMLBlocks):
        return weight
    if isinstance(weight, Affine):
        return _of_integers(weight)
    return _of_floats(weight) if isinstance(weight, Float4) else None


def _of_integers(weight: Affine) -> GGMLBlocks | None:
    n, k = weight.shape
    count = weight.scales.shape[1]
    if weight.groups is not None or k % count or (k // count) % _BLOCK:
        return None
    wide = float32(weight.scales)
    with np.errstate(all="ignore"):
        steps = wide.astype(np.float16)
        if not (np.isfinite(wide).all() and np.array_equal(steps.astype(np.float32), wide)):
            return None
    low, high = _bounds(weight)
    fitting = [form for form in _INTEGERS if form[1] <= low and high <= form[2]]
    if not fitting:
        return None
    name, _, _, put = fitting[0]
    type_ = _BY_NAME[name]
    raw = np.empty((n, k // _BLOCK, type_.nbytes), np.uint8)
    per_group = k // count // _BLOCK
    step = max(1, _SLICE // max(1, k))
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        codes = _signed(weight, part).reshape(-1, k // _BLOCK, _BLOCK)
        blocks = raw[part]
        blocks[..., :2] = steps[part].repeat(per_group, axis=1)[..., None].view(np.uint8)
        put(codes, blocks[..., 2:])
    return _made(raw, type_, weight)


def _bounds(weight: Affine) -> tuple[int, int]:
    """Least and greatest of codes less zero points: by the bits, or if that is more than an int8 holds, by looking."""
    signed = weight.codes.dtype == np.int8
    half = 2 ** (weight.bits - 1)
    low, high = (-half, half - 1) if signed else (0, 2 * half - 1)
    zeros = weight.zeros
    if zeros is not None and zeros.size:
        low, high = low - int(zeros.max()), high - int(zeros.min())
    if (low >= -128 and high <= 127) or not weight.codes.size:
        return low, high
    n, k = weight.shape
    step = max(1, _SLICE // max(1, k))
    parts = [_signed(weight, slice(start, min(start + step, n))) for start in range(0, n, step)]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def _signed(weight: Affine, part: slice) -> Array:
    """int16: codes less zero points of some rows."""
    codes = weight.codes[part].astype(np.int16)
    if weight.zeros is not None:
        groups = codes.reshape(len(codes), weight.zeros.shape[1], -1)
        groups -= weight.zeros[part].astype(np.int16)[..., None]
    return codes


def _of_floats(weight: Float4) -> GGMLBlocks | None:
    n, k = weight.shape
    bits = np.ascontiguousarray(weight.scales, np.float32).view(np.uint32)
    exponents = bits >> 23
    if weight.group % _BLOCK or k % _BLOCK or not np.array_equal(weight.table, E2M1):
        return None
    if (
        (bits & 0x7FFFFF).any() or (exponents < 2).any() or (exponents > 254).any()
    ):  # no power of two, or too small
        return None
    raw = np.empty((n, k // _BLOCK, _BY_NAME["MXFP4"].nbytes), np.uint8)
    raw[..., 0] = exponents.repeat(weight.group // _BLOCK, axis=1)
    pairs = weight.codes.reshape(n, k // _BLOCK, _BLOCK // 2)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(n, k // _BLOCK, _BLOCK)
    _nibbles(codes, raw[..., 1:])
    return _made(raw, _BY_NAME["MXFP4"], weight)


def _made(raw: Array, type_: GGMLType, weight: QuantizedWeight) -> GGMLBlocks:
    return GGMLBlocks(raw.reshape(-1), type_, weight.shape, weight.source)


def _nibbles(codes: Array, out: Array) -> None:
    """uint8 [..., 32] below 16 -> [..., 16]: byte i holds code i and, above it, code i + 16."""
    np.bitwise_or(codes[..., :16], codes[..., 16:] << 4, out=out)


def _q4_0(codes: Array, out: Array) -> None:
    _nibbles((codes + 8).astype(np.uint8), out)


def _q5_0(codes: Array, out: Array) -> None:
    shifted = (codes + 16).astype(np.uint8)
    out[..., :4] = np.packbits(shifted >> 4, axis=-1, bitorder="little")
    _nibbles(shifted & 15, out[..., 4:])


def _q8_0(codes: Array, out: Array) -> None:
    out[:] = codes.astype(np.int8).view(np.uint8)


_INTEGERS: tuple[tuple[str, int, int, Callable[[Array, Array], None]], ...] = (
    ("Q4_0", -8, 7, _q4_0), ("Q5_0", -16, 15, _q5_0), ("Q8_0", -128, 127, _q8_0),
)  # fmt: skip
"""Name, least and greatest code, and what writes codes behind a block's scale; from the smallest on."""
