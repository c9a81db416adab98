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
def rotary_and_cache(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, key_ptr, value_ptr, slots, q_stride, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF_PAD: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Programs (T, ceil(H / HEADS) + ceil(G / HEADS)). q [T, H, D], k, v [T, G, D] with the given token strides.

    cos, sin float32 [T, HALF]; the first 2 * HALF elements are rotated. key [blocks, G, D, BLOCK_SIZE],
    value [blocks, G, BLOCK_SIZE, D]. slots int64 [T].
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
        tl.store(to_k + i[None, :] * BLOCK_SIZE, first.to(key_ptr.dtype.element_ty), mask=k_pairs)
        tl.store(to_k + (i + HALF)[None, :] * BLOCK_SIZE, second.to(key_ptr.dtype.element_ty), mask=k_pairs)
        d = tl.arange(0, D_PAD)
        if 2 * HALF < D:
            rest = real & ((d >= 2 * HALF) & (d < D))[None, :]
            k = tl.load(at_k + d[None, :], mask=rest, other=0.0)
            tl.store(to_k + d[None, :] * BLOCK_SIZE, k.to(key_ptr.dtype.element_ty), mask=rest)
        inside = real & (d < D)[None, :]
        v = tl.load(v_ptr + token * v_stride + k_head[:, None] * D + d[None, :], mask=inside, other=0.0)
        tl.store(to_v + d[None, :], v.to(value_ptr.dtype.element_ty), mask=inside)
