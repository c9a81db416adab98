"""RMS norm (Zhang and Sennrich, 2019), alone and fused with the addition to the residual.

One program per row, the whole row in registers (up to 16384 columns: 64 floats for each of 256 threads), so x is
read once. Bytes per row: 2 * D * itemsize alone, 4 * D * itemsize fused (x and residual read, residual and result
written), and D * 4 of weights that stay in cache; about 4 * D FLOPs. Memory-bound.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, d, eps, FUSED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs (rows). x, residual, out [rows, d], weight float32 [d]. FUSED: residual += x, then that is
    normalised."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < d
    x = tl.load(x_ptr + row * d + i, mask=inside, other=0.0).to(tl.float32)
    if FUSED:
        at = residual_ptr + row * d + i
        # rounded as it is stored, so that the norm sees what the next layer will
        x = (x + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(at, x, mask=inside)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    scale = tl.math.rsqrt(tl.sum(x * x, 0) / d + eps)
    tl.store(out_ptr + row * d + i, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
