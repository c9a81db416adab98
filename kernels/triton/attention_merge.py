"""Merging the partial results of split attention by their log-sum-exp, in the order of positions.

O = sum_i 2^(LSE_i - LSE) O_i with LSE = log2 sum_i 2^LSE_i, as in Flash-Decoding (Dao et al., 2023). A row reads the
segments that its own position and window say it has, so its result depends on nothing else.

One program per (query, head): num_segments * (D + 1) * 4 bytes read, D * itemsize written, 2 * D FLOPs per segment.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["most_queries", "num_segments"])
def attention_merge(
    part_ptr, lse_ptr, sinks_ptr, out_ptr, query_start_loc, seq_lens, most_queries, num_segments, window,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SEGMENT: tl.constexpr, MOST_SHORT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Programs (S * most_queries, H). part, lse: as ``attention`` writes them. out [T, H, D]. sinks float32 [H]."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    sequence = place // most_queries
    query = place % most_queries
    start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - start
    if query >= queries:
        return
    if queries > MOST_SHORT:
        return
    position = tl.load(seq_lens + sequence) - queries + query
    d = tl.arange(0, D_PAD)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(0, position - window + 1) // SEGMENT
    row = (place.to(tl.int64) * HEADS + head) * num_segments
    if HAS_SINKS:  # a sink is a score without a value
        maximum = tl.load(sinks_ptr + head) * 1.4426950408889634
        total = maximum * 0.0 + 1.0
    else:
        maximum = tl.load(lse_ptr + row + begin)
        total = maximum * 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    for segment in range(begin, position // SEGMENT + 1):
        lse = tl.load(lse_ptr + row + segment)
        part = tl.load(part_ptr + (row + segment) * D + d, mask=d < D, other=0.0)
        peak = tl.maximum(maximum, lse)
        decay = tl.math.exp2(maximum - peak)
        weight = tl.math.exp2(lse - peak)
        total = tl.math.fma(total, decay, weight)
        acc = tl.math.fma(acc, decay, part * weight)
        maximum = peak
    at_out = out_ptr + ((start + query).to(tl.int64) * HEADS + head) * D + d
    tl.store(at_out, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)
