"""The value formats of GGUF and their expansion to fp32.

Block layouts after ggml's ``ggml-common.h``; the arithmetic follows ggml's reference step by step, so results
are equal bit for bit to ``gguf.quants.dequantize``. Work goes through cache-sized slices and writes each
output twice or three times while it is still in cache, which is what makes it fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paged_backend.errors import ModelLoadError

_SLICE = 1 << 16  # values per slice: a quarter of a megabyte of fp32 stays in the second-level cache


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage format: ``block`` values take ``nbytes`` bytes."""

    id: int
    name: str
    block: int
    nbytes: int


GGML_TYPES = {
    id: GGMLType(id, name, block, nbytes)
    for id, name, block, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip


def dequantize(raw: np.ndarray, type_: GGMLType) -> np.ndarray:
    """Expand uint8 [blocks * type_.nbytes] to float32 [blocks * type_.block].

    Raises ``ModelLoadError`` for integer formats, and for a rare format when the ``gguf`` package, which
    knows those, is missing.
    """
    kernel = _KERNELS.get(type_.name)
    if kernel is None:
        return _by_package(raw, type_)
    blocks = raw.reshape(-1, type_.nbytes)
    out = np.empty((len(blocks), type_.block), np.float32)
    step = _SLICE // type_.block
    # scales of a damaged file may be inf or nan; they propagate as in the reference, without a warning
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            kernel(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _by_package(raw: np.ndarray, type_: GGMLType) -> np.ndarray:
    try:
        import gguf
    except ImportError:
        raise ModelLoadError(
            f"{type_.name} tensors are expanded by the gguf package, which is missing: `pip install gguf`"
        ) from None
    try:
        data = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(type_.id))
    except (NotImplementedError, ValueError) as error:
        raise ModelLoadError(f"{type_.name} cannot be expanded to float32 ({error})") from error
    return np.ascontiguousarray(data, np.float32).reshape(-1)


def _half(blocks: np.ndarray, start: int, count: int = 1) -> np.ndarray:
    """fp16 numbers at byte ``start`` of each block -> fp32 [blocks, count]."""
    return blocks[:, start : start + 2 * count].copy().view(np.float16).astype(np.float32)


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view(np.float32) if blocks.ctypes.data % 4 == 0 else blocks.copy().view(np.float32)


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = _half(blocks, 0)


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    bits[:] = blocks.copy().view(np.uint16)
    bits <<= 16


def _f64(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.copy().view(np.float64)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Low nibbles, then high nibbles: uint8 [..., n] -> out [..., 2, n]."""
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out.reshape(-1, 2, 16))
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out.reshape(-1, 2, 16))
    scales = _half(blocks, 0, 2)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _five_bits(high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    """uint8 [n, 4] with the fifth bits, [n, 16] with nibbles -> out [n, 32]."""
    values = np.empty((len(low), 32), np.uint8)
    _nibbles(low, values.reshape(-1, 2, 16))
    values |= np.unpackbits(high, axis=1, bitorder="little") << 4
    out[:] = values


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    scales = _half(blocks, 0, 2)
    out *= scales[:, :1]
    out += scales[:, 1:]


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K: two fp32 [n, 8, 1].

    Twelve bytes hold them at 6 bits each: four scales, four minima (the top 2 bits of each of these bytes
    belong to the second four), then the low nibbles of the second four scales and, above them, of the second
    four minima.
    """
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (mixed >> 4) | ((second >> 2) & 48)], axis=1)
    steps = _half(blocks, 0, 2)
    return (
        (steps[:, :1] * scales.astype(np.float32))[:, :, None],
        (steps[:, 1:] * minima.astype(np.float32))[:, :, None],
    )


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    scales, minima = _k_scales(blocks)
    values = out.reshape(-1, 8, 32)
    values *= scales
    values -= minima


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    packed = np.empty((len(blocks), 8, 32), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), packed.reshape(-1, 4, 2, 32))
    for bit in range(8):
        packed[:, bit] |= (blocks[:, 16:48] >> bit & 1) << 4
    values = out.reshape(-1, 8, 32)
    values[:] = packed
    scales, minima = _k_scales(blocks)
    values *= scales
    values -= minima


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    packed = np.empty((len(blocks), 2, 4, 32), np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), packed.reshape(-1, 2, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for part in range(4):
        packed[:, :, part] |= (high >> (2 * part) & 3) << 4
    values = out.reshape(-1, 16, 16)
    values[:] = packed.reshape(-1, 16, 16)
    values -= 32
    values *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))[:, :, None]


_KERNELS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "F64": _f64, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1,
    "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
