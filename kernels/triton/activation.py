"""Gated activations: act(gate) * up of one [rows, 2 * d] matrix (SwiGLU and GeGLU; Shazeer, 2020).

One program computes BLOCK neighbouring outputs of a row. Bytes: 3 * d * itemsize per row (two halves read, one
result written), some ten FLOPs per output. Memory-bound.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def act_and_mul(x_ptr, out_ptr, d, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (rows, ceil(d / BLOCK)). x [rows, 2 * d], out [rows, d]. ACTIVATION: silu, gelu (erf) or gelu_tanh."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < d
    gate = tl.load(x_ptr + row * 2 * d + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * d + d + i, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 * (1 + tanh(inner)) is the logistic function of 2 * inner
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out_ptr + row * d + i, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)
