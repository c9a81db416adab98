"""compressed-tensors, the format of llm-compressor: integers, packed integers, e4m3, NVFP4 and MXFP4."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paged_backend.checkpoints.quantized import float8
from paged_backend.checkpoints.quantized.parts import Found, Parts
from paged_backend.checkpoints.quantized.unpack import unpack, unpack_words
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.affine import Affine
from paged_backend.kernels.array import float32
from paged_backend.kernels.float_codes import E2M1, E4M3, E8M0, Float4, Float8

FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")
_USED = ("weight", "weight_scale", "weight_zero_point")


def compressed_tensors(settings: Mapping[str, Any], source: str) -> Callable[[Parts], Found | None]:
    """Reader of ``quant_method: compressed-tensors``. Raises UnsupportedModelError."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ModelLoadError(f"{source}: config_groups of compressed-tensors is no object of objects")
    for name in (settings.get("format"), *(group.get("format") for group in groups.values())):
        if name is not None and name not in FORMATS:
            raise UnsupportedModelError(
                f"{source}: compressed-tensors with format {name!r} is not supported; use one of {', '.join(FORMATS)}"
            )
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise UnsupportedModelError(
            f"{source}: compressed-tensors with sparsity format {sparse!r} is not supported; use 'dense'"
        )
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModelError(
            f"{source}: compressed-tensors with a transform_config is not supported: its rotations are not applied"
        )
    return partial(_find, groups)


def _find(groups: Mapping[str, Mapping[str, Any]], parts: Parts) -> Found | None:
    packed = parts.dtype("weight_packed")
    if packed == "I32":
        return _find_packed(_scheme(groups, parts), parts)
    if packed == "U8":
        n, half = parts.matrix("weight_packed")
        used = ("weight_packed", "weight_scale", "weight_global_scale")
        return Found((n, 2 * half), partial(_read_four_bits, parts), used)
    if packed is not None:
        raise UnsupportedModelError(
            f"{parts.title}_packed has dtype {packed}, which is not supported; use I32 or U8"
        )
    if "weight_scale" not in parts:
        return None
    if parts.dtype("weight") == "I8":
        integer = partial(_read_int8, _scheme(groups, parts), parts)
        return Found(parts.matrix("weight"), integer, (*_USED, "weight_g_idx"))
    if parts.dtype("weight") == "F8_E4M3":
        # symmetric, so zero points that some versions store are zeros
        return Found(parts.matrix("weight"), partial(_read_float8, _scheme(groups, parts), parts), _USED)
    raise UnsupportedModelError(
        f"{parts.title} has a weight_scale and dtype {parts.dtype('weight')}, which is not supported; use I8 or F8_E4M3"
    )


def _scheme(groups: Mapping[str, Mapping[str, Any]], parts: Parts) -> Mapping[str, Any]:
    """What the config says of the weights of a module: by its name, or else by its class."""
    classes = []
    for group in groups.values():
        for target in group.get("targets") or ():
            if target.startswith("re:"):
                named = re.match(target[3:], parts.module) is not None
            else:
                named = parts.module == target or parts.module.endswith(f".{target}")
            if named:
                return group.get("weights") or {}
            if not target.startswith("re:") and "linear" in target.lower():
                classes.append(group)
    if not classes and len(groups) == 1:
        classes = list(groups.values())
    if not classes:
        raise ModelLoadError(f"{parts.title} is quantised, but no config_groups has it among its targets")
    return classes[0].get("weights") or {}


def _find_packed(scheme: Mapping[str, Any], parts: Parts) -> Found:
    bits = scheme.get("num_bits")
    if type(bits) is not int or not 2 <= bits <= 8 or scheme.get("type", "int") != "int":
        raise UnsupportedModelError(
            f"{parts.title}: packed weights of {bits!r} bits are not supported; use integers of 2 to 8"
        )
    n, words = parts.matrix("weight_packed", "I32")
    shape = parts.array("weight_shape", "I64", "I32").reshape(-1).tolist()
    if len(shape) != 2 or shape[0] != n or not 0 < shape[1] * bits <= 32 * words:
        raise ModelLoadError(
            f"{parts.title}: weight_shape {shape} does not fit {n} x {words} words of {bits} bits"
        )
    used = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return Found((n, shape[1]), partial(_read_packed, bits, (n, shape[1]), parts), used)


def _read_packed(bits: int, shape: tuple[int, int], parts: Parts) -> Affine:
    n, k = shape
    # some writers waste the highest bits of a word, some let codes run on into the next: the number of words tells
    packed = parts.array("weight_packed", "I32")
    whole = packed.shape[1] == -(-k // (32 // bits))
    codes = np.ascontiguousarray((unpack_words if whole else unpack)(packed, bits)[:, :k])
    scales = parts.array("weight_scale", *_FLOATS)
    scales = scales.reshape(n, -1) if scales.size > 1 else np.repeat(scales.reshape(1, 1), n, axis=0)
    # codes and zero points are stored with the same offset, which their difference does not see
    if parts.dtype("weight_zero_point") == "I32":
        words = np.ascontiguousarray(parts.array("weight_zero_point").T)
        per_word = words.shape[1] == -(-n // (32 // bits))
        zeros = np.ascontiguousarray((unpack_words if per_word else unpack)(words, bits)[:, :n].T)
    elif "weight_zero_point" in parts:
        zeros = parts.array("weight_zero_point", "I8").reshape(scales.shape).astype(np.int16) + 2 ** (
            bits - 1
        )
    else:
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    groups = parts.array("weight_g_idx", "I32", "I64") if "weight_g_idx" in parts else None
    return Affine(codes, scales, zeros, bits, groups, parts.title)


def _read_int8(scheme: Mapping[str, Any], parts: Parts) -> Affine:
    codes, scales = parts.array("weight", "I8"), parts.array("weight_scale", *_FLOATS)
    n = len(codes)
    scales = scales.reshape(n, -1) if scales.size > 1 else np.repeat(scales.reshape(1, 1), n, axis=0)
    zeros = None
    if "weight_zero_point" in parts:
        stored = parts.array("weight_zero_point", "I8", "I32", "I64")
        if stored.any():
            zeros = np.broadcast_to(
                stored.reshape(-1, stored.size // n if stored.size > 1 else 1), scales.shape
            )
    groups = parts.array("weight_g_idx", "I32", "I64") if "weight_g_idx" in parts else None
    return Affine(codes, scales, zeros, int(scheme.get("num_bits") or 8), groups, parts.title)


def _read_float8(scheme: Mapping[str, Any], parts: Parts) -> Float8:
    codes, scales = parts.array("weight"), parts.array("weight_scale", *_FLOATS, "U8", "F8_E8M0")
    if parts.dtype("weight_scale") in ("U8", "F8_E8M0"):
        scales = E8M0[scales]
    if "weight_zero_point" in parts and parts.array("weight_zero_point").view(np.uint8).any():
        raise UnsupportedModelError(f"{parts.title}: zero points of e4m3 weights are not supported")
    block, size = scheme.get("block_structure"), scheme.get("group_size")
    if scheme.get("strategy") == "block" and isinstance(block, list) and len(block) == 2:
        shared: tuple[int, int] | None = (int(block[0]), int(block[1]))
    else:
        shared = (1, int(size)) if size and scheme.get("strategy") == "group" else None
    return Float8(codes, *float8.spread(scales, codes.shape, shared, parts), source=parts.title)


def _read_four_bits(parts: Parts) -> Float4:
    codes = parts.array("weight_packed", "U8")
    if "weight_global_scale" in parts:  # NVFP4, and the scale of the whole is a divisor
        whole = float32(parts.array("weight_global_scale", "F32")).reshape(-1)
        if len(whole) != 1:
            raise ModelLoadError(f"{parts.title}: weight_global_scale has {len(whole)} values, expected one")
        with np.errstate(all="ignore"):
            scales = E4M3[parts.array("weight_scale", "F8_E4M3")] / whole
    else:
        scales = E8M0[parts.array("weight_scale", "U8", "F8_E8M0")]
    return Float4(codes, scales, E2M1, parts.title)
