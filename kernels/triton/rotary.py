"""Rotary position embedding (Su et al., 2021; "rotate half" layout) fused with the write of keys and values.

One program takes HEADS neighbouring heads of one token; the first ceil(H / HEADS) programs of a token rotate its
queries, the others its keys and move its values. Bytes per token: (2 * H + 4 * G) * D * itemsize for q, k, v read and
written, plus R * 4 of cos and sin. 3 FLOPs per rotated element: memory-bound.

Keys are stored with tokens as columns, so one token's key is D separate elements, each in a sector of its own:
32 bytes written per element, which for one token per sequence is little beside the keys that attention then
reads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(at, cos, sin, inside, HALF: tl.constexpr):
    """Rotate pairs (i, i + HALF) in place; returns both halves as they were stored, in float32."""
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    first = (low * cos - high * sin).to(at.dtype.element_ty)
    second = (high * cos + low * sin).to(at.dtype.element_ty)
    tl.store(at, first, mask=inside)
    tl.store(at + HALF, second, mask=inside)
    return first, second


@triton.jit
def _largest(x):
    """Bits of the largest |element| of each row of x, zeros included; above all is what is not finite."""
    return tl.max(tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True), 1)


@triton.jit
def _scale(largest):
    """Bits, as a bfloat16 number, of the scale of rows with these largest elements; see ``kv_cache.quantize``."""
    bits = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0).to(tl.int32, bitcast=True)
    return tl.where(largest < 0x7F800000, (bits + 0xFFFF) >> 16, 0x7FC0)


@triton.jit
def _codes(x, scale):
    """int8 codes of the rows of x."""
    step = (scale << 16).to(tl.float32, bitcast=True)[:, None]
    # adding 1.5 * 2^23 rounds to an integer, halves to even, that is kept in the low bits
    steps = tl.div_rn(x.to(tl.float32), tl.where(step > 0.0, step, 1.0)) + 12582912.0
    return tl.where(step > 0.0, steps.to(tl.int32, bitcast=True) - 0x4B400000, 0).to(tl.int8)


@triton.jit
def rotary_and_cache(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, key_scale, value_scale, slots,
    q_stride, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF_PAD: tl.constexpr, D_PAD: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Programs (T, ceil(H / HEADS) + ceil(G / HEADS)). q [T, H, D], k, v [T, G, D] with the given token strides.

    cos, sin float32 [T, HALF]; the first 2 * HALF elements are rotated. key [blocks, G, D, BLOCK_SIZE],
    value [blocks, G, BLOCK_SIZE, D]. slots int64 [T]. CODES: the cache is of int8, with scales int16 (the bits of
    bfloat16) [blocks, G, BLOCK_SIZE]; else those are not looked at.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    i = tl.arange(0, HALF_PAD)
    head = tl.arange(0, HEADS)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    if part < Q_PARTS:
        q_head = part * HEADS + head
        pairs = (q_head < H)[:, None] & (i < HALF)[None, :]
        _rotate(q_ptr + token * q_stride + q_head[:, None] * D + i[None, :], cos, sin, pairs, HALF)
    else:
        k_head = (part - Q_PARTS) * HEADS + head
        real = (k_head < G)[:, None]
        slot = tl.load(slots + token)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        at_k = k_ptr + token * k_stride + k_head[:, None] * D
        to_k = key_ptr + (block * G + k_head[:, None]) * D * BLOCK_SIZE + offset
        to_v = value_ptr + ((block * G + k_head[:, None]) * BLOCK_SIZE + offset) * D
        k_pairs = real & (i < HALF)[None, :]
        first, second = _rotate(at_k + i[None, :], cos, sin, k_pairs, HALF)
        d = tl.arange(0, D_PAD)
        rest = real & ((d >= 2 * HALF) & (d < D))[None, :]
        if 2 * HALF < D:
            k = tl.load(at_k + d[None, :], mask=rest, other=0.0)
        inside = real & (d < D)[None, :]
        v = tl.load(v_ptr + token * v_stride + k_head[:, None] * D + d[None, :], mask=inside, other=0.0)
        if CODES:
            largest = tl.maximum(_largest(first), _largest(second))
            if 2 * HALF < D:
                largest = tl.maximum(largest, _largest(k))
            scale = _scale(largest)
            at_scale = (block * G + k_head) * BLOCK_SIZE + offset
            tl.store(key_scale + at_scale, scale.to(tl.int16), mask=k_head < G)
            first = _codes(first, scale)
            second = _codes(second, scale)
            if 2 * HALF < D:
                k = _codes(k, scale)
            scale = _scale(_largest(v))
            tl.store(value_scale + at_scale, scale.to(tl.int16), mask=k_head < G)
            v = _codes(v, scale)
        tl.store(to_k + i[None, :] * BLOCK_SIZE, first.to(key_ptr.dtype.element_ty), mask=k_pairs)
        tl.store(to_k + (i + HALF)[None, :] * BLOCK_SIZE, second.to(key_ptr.dtype.element_ty), mask=k_pairs)
        if 2 * HALF < D:
            tl.store(to_k + d[None, :] * BLOCK_SIZE, k.to(key_ptr.dtype.element_ty), mask=rest)
        tl.store(to_v + d[None, :], v.to(value_ptr.dtype.element_ty), mask=inside)
