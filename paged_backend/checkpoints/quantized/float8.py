"""FP8: codes of e4m3 with scales for a tensor, for each output, or for blocks (DeepSeek, Qwen, FBGEMM, ModelOpt)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paged_backend.checkpoints.quantized.parts import Found, Parts
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.array import Array
from paged_backend.kernels.float_codes import E8M0, Float8

SCALES = ("F32", "BF16", "F16", "F8_E8M0")


def fp8(settings: Mapping[str, Any], source: str) -> Callable[[Parts], Found | None]:
    """Reader of ``quant_method: fp8`` and ``fbgemm_fp8``. Raises UnsupportedModelError."""
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise UnsupportedModelError(
            f"{source}: fp8 with weight_block_size {block!r} is not supported; use two sizes"
        )
    if str(settings.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn", "e4m3fn"):
        raise UnsupportedModelError(
            f"{source}: fp8 with fmt {settings['fmt']!r} is not supported; use 'e4m3'"
        )
    return partial(find, None if block is None else (block[0], block[1]))


def find(block: tuple[int, int] | None, parts: Parts) -> Found | None:
    """A weight of e4m3 codes. block: of its scales where there is neither one nor one for each output."""
    if parts.dtype("weight") in ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        raise UnsupportedModelError(
            f"{parts.title} has dtype {parts.dtype('weight')}, which is not supported; use F8_E4M3"
        )
    if parts.dtype("weight") != "F8_E4M3":
        return None
    shape = parts.matrix("weight")
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    parts.stored(name, *SCALES)
    return Found(shape, partial(_read, block, name, parts), ("weight", name))


def _read(block: tuple[int, int] | None, name: str, parts: Parts) -> Float8:
    """Despite the name, ``weight_scale_inv`` multiplies."""
    codes, scales = parts.array("weight"), parts.array(name)
    if parts.dtype(name) == "F8_E8M0":
        scales = E8M0[scales]
    return Float8(codes, *spread(scales, codes.shape, block, parts), source=parts.title)


def spread(
    scales: Array, shape: tuple[int, ...], block: tuple[int, int] | None, parts: Parts
) -> tuple[Array, tuple[int, int]]:
    """Scales as a matrix, and the block of weights that each is for. Raises ModelLoadError."""
    n, k = shape
    if scales.size == 1:
        return scales.reshape(1, 1), (max(1, n), max(1, k))
    if scales.shape in ((n,), (n, 1)) and block is None:
        return scales.reshape(n, 1), (1, max(1, k))
    if scales.ndim == 2 and block is not None:
        return scales, block
    raise ModelLoadError(
        f"{parts.title}: scales {np.shape(scales)} are neither one, nor one for each output, nor for blocks that "
        "the config names"
    )
