"""GPTQ and AWQ: transposed matrices of integer codes in int32 words, with a zero point for each group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paged_backend.checkpoints.quantized.parts import Found, Parts
from paged_backend.checkpoints.quantized.unpack import unpack
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.affine import Affine
from paged_backend.kernels.array import Array

_FLOATS = ("F16", "BF16", "F32")
_BITS = (2, 3, 4, 8)
# within a word of AWQ, column c is nibble _NIBBLES[c]
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(settings: Mapping[str, Any], source: str) -> Callable[[Parts], Found | None]:
    """Reader of ``quant_method: gptq``. Raises UnsupportedModelError."""
    bits = settings.get("bits")
    if bits not in _BITS:
        raise UnsupportedModelError(
            f"{source}: gptq with bits {bits!r} is not supported; use {', '.join(map(str, _BITS))}"
        )
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{source}: gptq with checkpoint_format {layout!r} is not supported; use 'gptq' or 'gptq_v2'"
        )
    return partial(_find_gptq, bits, bool(settings.get("sym", True)), layout == "gptq_v2")


def _find_gptq(bits: int, symmetric: bool, plain_zeros: bool, parts: Parts) -> Found | None:
    if "qweight" not in parts:
        return None
    words, n = parts.matrix("qweight", "I32")
    k = parts.stored("g_idx", "I32").shape[0] if "g_idx" in parts else words * 32 // bits
    # settings may give some modules other bits; the sizes tell
    own = words * 32 // k if k else 0
    if own not in _BITS or words * 32 != k * own:
        raise ModelLoadError(f"{parts.title}: {words} words for {k} inputs are no 2, 3, 4 or 8 bits each")
    used = ("qweight", "qzeros", "scales", "g_idx")
    return Found((n, k), partial(_read_gptq, own, symmetric, plain_zeros, parts), used)


def _read_gptq(bits: int, symmetric: bool, plain_zeros: bool, parts: Parts) -> Affine:
    codes = unpack(parts.array("qweight", "I32").T, bits)
    n = len(codes)
    scales = parts.array("scales", *_FLOATS)
    zeros = unpack(parts.array("qzeros", "I32"), bits)[:, :n]
    middle = 2 ** (bits - 1)
    # files of either convention exist under both names; where all zero points are the middle, they show which it is
    if symmetric and zeros.size and (zeros == zeros.flat[0]).all() and zeros.flat[0] in (middle - 1, middle):
        plain_zeros = bool(zeros.flat[0] == middle)
    if not plain_zeros:
        zeros = zeros + np.uint8(1) & np.uint8(2**bits - 1)
    groups = parts.array("g_idx", "I32") if "g_idx" in parts else None
    if groups is not None and _in_order(groups, len(scales)):
        groups = None
    return Affine(
        codes, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T), bits, groups, parts.title
    )


def _in_order(groups: Array, count: int) -> bool:
    """Whether inputs are in ``count`` groups of one size, one after the other."""
    k = len(groups)
    return count > 0 and k % count == 0 and np.array_equal(groups, np.arange(k) // (k // count))


def awq(settings: Mapping[str, Any], source: str) -> Callable[[Parts], Found | None]:
    """Reader of ``quant_method: awq``. Raises UnsupportedModelError."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise UnsupportedModelError(
            f"{source}: awq with bits {bits!r} and version {version!r} is not supported; use 4 and 'gemm'"
        )
    return _find_awq


def _find_awq(parts: Parts) -> Found | None:
    if "qweight" not in parts:
        return None
    k, words = parts.matrix("qweight", "I32")
    _, outputs = parts.matrix("scales", *_FLOATS)
    if outputs != 8 * words:
        raise ModelLoadError(
            f"{parts.title}: {words} words for {outputs} outputs: this is not the layout of version 'gemm'"
        )
    return Found((outputs, k), partial(_read_awq, parts), ("qweight", "qzeros", "scales"))


def _read_awq(parts: Parts) -> Affine:
    codes, zeros = (_awq_columns(parts.array(name, "I32")) for name in ("qweight", "qzeros"))
    scales = parts.array("scales", *_FLOATS)
    return Affine(codes, np.ascontiguousarray(scales.T), zeros, 4, None, parts.title)


def _awq_columns(words: Array) -> Array:
    """int32 [R, C / 8] -> uint8 [C, R]."""
    nibbles = unpack(words, 4).reshape(*words.shape, 8)[..., _NIBBLES]
    return np.ascontiguousarray(nibbles.reshape(len(words), -1).T)
