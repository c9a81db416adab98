"""x @ W.T + b with int8 or int4 weights that become floating point in the tile ("weight-only" quantization).

One program computes BLOCK_M x BLOCK_N outputs and walks K in steps of BLOCK_K in one fixed order. FLOPs: 2 * T
* N * K. Bytes: N * K (int8) or N * K * 5 / 8 (int4) per BLOCK_M rows of x; with up to 16 rows (decode) the
weights are read once and nothing else counts, so the best that can be had over bf16 is a factor 2 and 3.2. Not
worth it for prefill, where the tensor cores are the limit.

A result depends on the number of rows through the shape of the tile only (three cases, see ``tiles``): BLOCK_K and
the matrix instruction give the order in which K is summed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _for_each_byte(x, GROUPS: tl.constexpr, N: tl.constexpr):
    """[GROUPS, N] -> [GROUPS * 16, N]: what belongs to a group, for each of its bytes."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [GROUPS, 16, N]), [GROUPS * 16, N])


@triton.jit(do_not_specialize=["rows"])
def int_matmul(
    x_ptr, numbers_ptr, scale_ptr, minimum_ptr, bias_ptr, out_ptr, rows, n, k, groups,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs (ceil(rows / BLOCK_M), ceil(n / BLOCK_N)). x, out [rows, k], [rows, n]; weights as in ``quantize``.

    groups: of 32 inputs (int4), ceil(k / 32); an argument, as only what the launch knows to be a multiple of 16 lets
    scales be read several at once. bias float32 [n]. WIDE: the dtype that products are taken in; weights are first
    rounded to x's.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = (m < rows)[:, None]
    in_n = (j < n)[None, :]
    x_row = x_ptr + m.to(tl.int64)[:, None] * k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    narrow = x_ptr.dtype.element_ty
    if BITS == 8:
        i = tl.arange(0, BLOCK_K)
        at_w = numbers_ptr + j.to(tl.int64)[None, :] * k + i[:, None]
        for first in range(0, k, BLOCK_K):
            inside = first + i < k
            x = tl.load(x_row + (first + i)[None, :], mask=in_m & inside[None, :], other=0.0)
            w = tl.load(at_w + first, mask=in_n & inside[:, None], other=0)
            acc = tl.dot(x.to(WIDE), w.to(tl.float32).to(narrow).to(WIDE), acc, input_precision="ieee")
        acc = acc * tl.load(scale_ptr + j, mask=j < n, other=0.0)[None, :]
    else:
        PER_TILE: tl.constexpr = BLOCK_K // 32
        i = tl.arange(0, BLOCK_K // 2)
        group = i // 16
        place = group * 32 + i % 16  # the input of a byte's low half; its high half has the one 16 further
        at_w = numbers_ptr + j.to(tl.int64)[None, :] * (groups * 16) + i[:, None]
        own = tl.arange(0, PER_TILE)
        at_g = j.to(tl.int64)[None, :] * groups + own[:, None]
        for first in range(0, k, BLOCK_K):
            both = tl.load(at_w + first // 2, mask=in_n & (first // 32 + group < groups)[:, None], other=0)
            # one for each group, then to all its bytes
            stored = in_n & (first // 32 + own < groups)[:, None]
            scale = tl.load(scale_ptr + at_g + first // 32, mask=stored, other=0.0)
            minimum = tl.load(minimum_ptr + at_g + first // 32, mask=stored, other=0.0)
            scale = _for_each_byte(scale, PER_TILE, BLOCK_N).to(tl.float32)
            minimum = _for_each_byte(minimum, PER_TILE, BLOCK_N).to(tl.float32)
            at = first + place
            x_low = tl.load(x_row + at[None, :], mask=in_m & (at < k)[None, :], other=0.0)
            x_high = tl.load(x_row + at[None, :] + 16, mask=in_m & (at + 16 < k)[None, :], other=0.0)
            low = tl.math.fma((both & 15).to(tl.float32), scale, minimum).to(narrow).to(WIDE)
            high = tl.math.fma((both >> 4).to(tl.float32), scale, minimum).to(narrow).to(WIDE)
            acc = tl.dot(x_low.to(WIDE), low, acc, input_precision="ieee")
            acc = tl.dot(x_high.to(WIDE), high, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + j, mask=j < n, other=0.0)[None, :]
    at_out = out_ptr + m.to(tl.int64)[:, None] * n + j[None, :]
    tl.store(at_out, acc.to(out_ptr.dtype.element_ty), mask=in_m & in_n)
