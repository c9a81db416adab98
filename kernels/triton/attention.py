"""Unified paged attention: prefill, chunk, decode and any mixture in one kernel.

Online softmax over tiles of keys as in FlashAttention-2 (Dao, 2023, algorithm 1); the contexts of short queries are
split and merged as in Flash-Decoding (Dao et al., 2023), but at fixed positions; keys and values are found through a
block table as in PagedAttention (Kwon et al., 2023).

One program computes a tile of BLOCK_M rows: the GROUP query heads that share a key head, for BLOCK_Q = BLOCK_M
// GROUP consecutive queries of one sequence, so that a key is read once for all its heads. Nothing on the host
depends on the lengths.

Two classes of sequences, chosen by a sequence's own number of queries in the step, never by its neighbours; each
has a launch of its own, in which the programs of the other's sequences end at once:

- short (at most BLOCK_Q queries with BLOCK_M = max(16, GROUP); decode): a sequence is one tile. Its context is cut
  at multiples of SEGMENT tokens, which several programs, the workers, share; each segment's (O, LSE) is written by
  itself and ``attention_merge`` adds them in the order of positions. Where no context of a step reaches beyond the
  first segment, the result is written at once, computed as the merge would. Neither the number of workers nor the
  batch is visible in a bit.
- long (prefill): one program goes through the whole context of its rows. Tile i finds its sequence by binary search
  over ``query_start_loc``: sequence s owns the tiles from ``query_start_loc[s] // BLOCK_Q + s`` on, which is
  enough for its queries wherever it begins; tiles left over end at once. The last tile of a prompt sees the
  most keys. Programs begin in the order of their ids, so tiles are taken from the last to the first and all key
  heads of a tile one after another: what remains for the end is short, and no processor is left alone with the
  longest tile.

Within a class a row's bits depend on its own query and context alone: tiles of keys lie at absolute multiples
of BLOCK_N, a masked key contributes an exact zero, and the multiply-adds of the softmax are written out so that
no compiler fuses them differently in the masked and the unmasked loop.

Cost of a row with context n: 4 * n * D FLOPs. Bytes of a tile: 2 * n * D * itemsize of keys and values for
BLOCK_M rows, so decode reads each key and value once per step (GROUP FLOPs per byte with 2-byte elements:
memory-bound up to a group of about 300 on an H100), and prefill does BLOCK_M FLOPs per byte. Partial
results add 8 * D * GROUP bytes per SEGMENT * D * 2 * itemsize bytes of KV: below 2 % for a group of 4 in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_start_loc, num_seqs, program, BLOCK_Q: tl.constexpr):
    """The last sequence s with ``query_start_loc[s] // BLOCK_Q + s <= program``."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if first <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tile(
    q, maximum, total, acc, start, low, high, position, table, key, value, key_scale, value_scale,
    scale, softcap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    ROUND: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. start + BLOCK_N - 1 to the running (maximum, total, acc) of BLOCK_M rows.

    Not MASKED: the caller knows that every row sees every key of the tile.
    """
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    in_dim = d < D
    number = n // BLOCK_SIZE
    if MASKED:
        # whole blocks, so that neighbouring keys are known to be neighbours and are read at once
        inside = (n >= low) & (n < high)
        covered = (number >= low // BLOCK_SIZE) & (number <= (high - 1) // BLOCK_SIZE)
        block = tl.load(table + number, mask=covered, other=0).to(tl.int64)
    else:
        block = tl.load(table + number).to(tl.int64)
    offset = n % BLOCK_SIZE
    at_k = key + block[None, :] * BLOCK_STRIDE + d[:, None] * BLOCK_SIZE + offset[None, :]
    at_v = value + block[:, None] * BLOCK_STRIDE + offset[:, None] * D + d[None, :]
    # memory that holds no token may hold anything: its scores are thrown away, its values must not be read, as
    # NaN times a weight of zero is NaN
    k = tl.load(at_k) if D == D_PAD else tl.load(at_k, mask=in_dim[:, None], other=0.0)
    if MASKED:
        v = tl.load(at_v, mask=inside[:, None] & in_dim[None, :], other=0.0)
    elif D == D_PAD:
        v = tl.load(at_v)
    else:
        v = tl.load(at_v, mask=in_dim[None, :], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if CODES:
        at_scale = block * (BLOCK_STRIDE // D) + offset
        if MASKED:
            k_scale = tl.load(key_scale + at_scale, mask=inside, other=0)
            v_scale = tl.load(value_scale + at_scale, mask=inside, other=0)
        else:
            k_scale = tl.load(key_scale + at_scale)
            v_scale = tl.load(value_scale + at_scale)
        scores *= (k_scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)[None, :]
        values_by = (v_scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), which saturates to +-1 by itself
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
        factor = 1.4426950408889634  # log2(e): the softmax is computed in powers of two
    else:
        factor = scale * 1.4426950408889634
    if MASKED:
        visible = inside[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - n[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(maximum, tl.max(scores, 1) * factor)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet: no inf - inf
    weights = tl.math.exp2(tl.math.fma(scores, factor, -shift[:, None]))
    decay = tl.math.exp2(maximum - shift)
    total = tl.math.fma(total, decay, tl.sum(weights, 1))
    v = v.to(q.dtype)
    if CODES:
        if tl.float16 == ROUND:  # in which a small weight times a small scale would be lost
            v = v * values_by.to(ROUND).to(q.dtype)[:, None]
        else:
            weights *= values_by[None, :]
    weights = weights.to(ROUND).to(q.dtype)
    acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return peak, total, acc


# these change from step to step: specialised, each alignment of each would be compiled anew in the middle of serving
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "most_queries", "num_segments", "workers"])
def attention(
    q_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, sinks_ptr, query_start_loc, seq_lens, block_table,
    key_scale, value_scale,
    num_seqs, table_stride, q_stride, most_queries, num_segments, workers, scale, softcap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
    MOST_SHORT: tl.constexpr, SHORT: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Programs (S, G, workers) if SHORT, else ((T // BLOCK_Q + S) * G,); see the module for how they divide the work.

    q [T, H, D] with stride q_stride between tokens. key [blocks, G, D, BLOCK_SIZE], value [blocks, G, BLOCK_SIZE, D].
    query_start_loc int32 [S+1], seq_lens int32 [S], block_table int32 [S, table_stride].
    SPLIT (SHORT only): out is the partial result float32 [S * most_queries, H, num_segments, D], lse float32 the
    same without D, in powers of two. Otherwise: out [T, H, D], lse unused, sinks float32 [H] if HAS_SINKS; if SHORT,
    no context is longer than SEGMENT and there is one worker.
    MOST_SHORT: queries up to which a sequence is short, BLOCK_Q if SHORT. WIDE: the dtype that products are taken
    in. ROUND: the dtype of the weights of values. CODES: keys and values are int8 codes with scales int16 (the bits of
    bfloat16) [blocks, G, BLOCK_SIZE]; else those are not looked at.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if SHORT:
        sequence = tl.program_id(0)
        g = tl.program_id(1)
    else:  # one axis: the others end at 65535
        program = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUPS
        g = tl.program_id(0) % GROUPS
        sequence = find_sequence(query_start_loc, num_seqs, program, BLOCK_Q)
    start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - start
    if (queries <= MOST_SHORT) != SHORT:
        return
    tile = 0
    if not SHORT:
        tile = program - (start // BLOCK_Q + sequence)
    if tile * BLOCK_Q >= queries:
        return
    length = tl.load(seq_lens + sequence)
    first = length - queries + tile * BLOCK_Q
    high = tl.minimum(length, first + BLOCK_Q)  # keys that some row sees: low .. high - 1
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, first - window + 1)
    if SPLIT:
        own = low // SEGMENT + tl.program_id(2)  # the worker's first segment
        if own * SEGMENT >= high:
            return

    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    query = tile * BLOCK_Q + row // GROUP
    head = g * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (query < queries)
    position = length - queries + query
    at_q = q_ptr + (start + query).to(tl.int64)[:, None] * q_stride + head[:, None] * D + d[None, :]
    q = tl.load(at_q, mask=real[:, None] & (d < D)[None, :], other=0.0).to(WIDE)

    BLOCK_STRIDE: tl.constexpr = GROUPS * D * BLOCK_SIZE
    table = block_table + sequence.to(tl.int64) * table_stride
    key = key_ptr + g * D * BLOCK_SIZE
    value = value_ptr + g * D * BLOCK_SIZE
    key_scale += g * BLOCK_SIZE
    value_scale += g * BLOCK_SIZE

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if SPLIT:
        place = (sequence * most_queries + query).to(tl.int64)
        at_lse = lse_ptr + (place * HEADS + head) * num_segments
        # one loop over the tiles of all the worker's segments, so that the first tiles of a segment are fetched
        # while the last of the one before are multiplied
        PER_SEGMENT: tl.constexpr = SEGMENT // BLOCK_N
        own_segments = tl.cdiv(tl.cdiv(high, SEGMENT) - own, workers)
        last = own + (own_segments - 1) * workers
        begin = tl.maximum(0, low - own * SEGMENT) // BLOCK_N
        end = own_segments * PER_SEGMENT - tl.maximum(0, last * SEGMENT + SEGMENT - high) // BLOCK_N
        for i in range(begin, end):
            segment = own + i // PER_SEGMENT * workers
            n = segment * SEGMENT + i % PER_SEGMENT * BLOCK_N
            maximum, total, acc = _attend_tile(
                q, maximum, total, acc, n, low, high, position, table, key, value, key_scale, value_scale,
                scale, softcap, window,
                D, D_PAD, BLOCK_SIZE, BLOCK_STRIDE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True, ROUND, CODES,
            )  # fmt: skip
            complete = (i % PER_SEGMENT == PER_SEGMENT - 1) | (i == end - 1)
            if complete:
                # a row that sees nothing of this segment writes what the merge will not read
                safe = tl.where(total == 0.0, 1.0, total)
                tl.store(at_lse + segment, maximum + tl.math.log2(safe), mask=real)
                at_out = out_ptr + ((place * HEADS + head) * num_segments + segment)[:, None] * D
                # in halves, as what is stored passes through shared memory of its own
                left, right = tl.split(
                    tl.permute(tl.reshape(acc / safe[:, None], [BLOCK_M, 2, D_PAD // 2]), (0, 2, 1))
                )
                c = tl.arange(0, D_PAD // 2)
                tl.store(at_out + c[None, :], left, mask=real[:, None] & (c < D)[None, :])
                c += D_PAD // 2
                tl.store(at_out + c[None, :], right, mask=real[:, None] & (c < D)[None, :])
            maximum = tl.where(complete, float("-inf"), maximum)
            total = tl.where(complete, 0.0, total)
            acc = tl.where(complete, 0.0, acc)
    else:
        begin = low // BLOCK_N * BLOCK_N
        whole = begin  # tiles of keys that even the first query sees to the end
        if not SHORT and not HAS_WINDOW:
            whole = (first + 1) // BLOCK_N * BLOCK_N
            for n in range(begin, whole, BLOCK_N):
                maximum, total, acc = _attend_tile(
                    q, maximum, total, acc, n, low, high, position, table, key, value, key_scale, value_scale,
                    scale, softcap, window,
                    D, D_PAD, BLOCK_SIZE, BLOCK_STRIDE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False, ROUND, CODES,
                )  # fmt: skip
        for n in range(whole, high, BLOCK_N):
            maximum, total, acc = _attend_tile(
                q, maximum, total, acc, n, low, high, position, table, key, value, key_scale, value_scale,
                scale, softcap, window,
                D, D_PAD, BLOCK_SIZE, BLOCK_STRIDE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True, ROUND, CODES,
            )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=real, other=0.0) * 1.4426950408889634
            if SHORT:  # to the bit what attention_merge makes of one segment
                acc = acc / total[:, None]
                maximum += tl.math.log2(total)
                total = total * 0.0 + 1.0
            peak = tl.maximum(maximum, sink)
            decay = tl.math.exp2(maximum - peak)
            total = tl.math.fma(total, decay, tl.math.exp2(sink - peak))
            acc = acc * decay[:, None]
        out = acc / total[:, None]
        at_out = out_ptr + ((start + query).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        tl.store(at_out, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])
