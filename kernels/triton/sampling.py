"""Sampling on the device: temperature, top-k, top-p, min-p and the draw, one program per row, without sorting.

The definitions are those of ``runner.sampler`` (which see), so that both draw the same token from the same noise: the
k-th largest value and the edge of the nucleus are found by bisection over the bits of the float (a float's
bits, suitably flipped, are ordered like its value), a count or a sum of weights per step; then one walk in the
order of token ids finds where the running sum passes the noise.

A pass of the bisection keeps BLOCK counts and float32 sums, one for every BLOCK-th token, and adds them up (in
float64) at its end: threads that had to agree on a sum for each block would wait for each other as often, and for
memory each time, as only a loop without that is one whose next blocks can be fetched ahead. The walk needs the sum at
each block: it takes it in float32 over BLOCK tokens and in float64 from block to block.

Passes over the row: 1 (greedy), 3 (temperature only), and up to 32 more for each of top-k and top-p. A row of 128k
logits is 512 KB and stays in L2: bytes of a pass come from there, and from device memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """float32 as int32 of the same order (NaN aside); the two zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _above(row, v, best, temperature, key, floor, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(count, sum of weights e^((x - best) / temperature)) of the values whose key is > ``key`` and >= ``floor``."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, v, BLOCK, num_stages=STAGES):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < v, other=float("-inf"))
        keys = _ordered(x)
        inside = (i < v) & (keys > key) & (keys >= floor)
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp((x - best) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def sample(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, noise_ptr, token_ptr, v, stride,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs (rows). logits float32 [R, v] with the given row stride. token int64 [R]: the id, -1 if not finite.

    temperature float32 [R], 0 for greedy (the lower id of equal maxima). top_k int32 [R], 0 for all. top_p,
    min_p float32 [R], 1 and 0 for none. noise float64 [R] in [0, 1). STAGES: blocks under way and in use at once.
    """
    r = tl.program_id(0)
    row = logits_ptr + r.to(tl.int64) * stride
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    places = tl.zeros([BLOCK], tl.int32)
    strange = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, v, BLOCK, num_stages=STAGES):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < v, other=float("-inf"))
        strange |= (x != x).to(tl.int32)
        better = x > peaks  # the first of equals stays
        peaks = tl.where(better, x, peaks)
        places = tl.where(better, i, places)
    broken = tl.max(strange, 0)
    best = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == best, places, 0x7FFFFFFF), 0)
    if (broken > 0) | (best == float("inf")) | (best == float("-inf")):
        tl.store(token_ptr + r, (token * 0 - 1).to(tl.int64))
        return
    temperature = tl.load(temperature_ptr + r)
    if temperature == 0.0:
        tl.store(token_ptr + r, token.to(tl.int64))
        return
    temperature = tl.maximum(temperature, 1e-30)
    top_k = tl.load(top_k_ptr + r)
    top_p = tl.load(top_p_ptr + r)
    min_p = tl.load(min_p_ptr + r)

    LOWEST: tl.constexpr = -2139095041  # the key of -inf
    floor = best.to(tl.int32) * 0 + LOWEST  # values below this key are out
    if (top_k > 0) & (top_k < v):
        # the largest key with at least top_k values at or above it, which is > key - 1
        low = _ordered(best) * 0 + LOWEST
        high = _ordered(best)
        while low < high:
            middle = low + ((high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
            count, _mass = _above(row, v, best, temperature, middle - 1, floor, BLOCK, STAGES)
            if count >= top_k:
                low = middle
            else:
                high = middle - 1
        floor = low
    ties = v  # how many values at the edge itself are in, lowest ids first
    edge = floor
    if top_p < 1.0:
        _count, whole = _above(row, v, best, temperature, floor - 1, floor, BLOCK, STAGES)
        target = whole * top_p.to(tl.float64)
        # the smallest key with less than the target above it
        low = floor
        high = _ordered(best)
        while low < high:
            middle = low + ((high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)
            _count, mass = _above(row, v, best, temperature, middle, floor, BLOCK, STAGES)
            if mass < target:
                high = middle
            else:
                low = middle + 1
        edge = low
        _count, mass = _above(row, v, best, temperature, edge, floor, BLOCK, STAGES)
        bits = tl.where(edge < 0, edge ^ 0x7FFFFFFF, edge)
        weight = tl.exp((bits.to(tl.float32, bitcast=True) - best) / temperature)
        missing = (target - mass) / tl.maximum(weight, 1e-38).to(tl.float64)
        ties = tl.minimum(tl.maximum(tl.math.ceil(missing), 1.0), v.to(tl.float64)).to(tl.int32)

    # twice in the order of ids: what is left adds up to, and where the noise falls in it
    whole = tl.zeros([], tl.float64)
    for walk in tl.static_range(2):
        target = whole * tl.load(noise_ptr + r)
        passed = tl.zeros([], tl.float64)
        seen = 0
        picked = 0x7FFFFFFF
        last = 0
        for first in range(0, v, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(row + i, mask=i < v, other=float("-inf"))
            keys = _ordered(x)
            tied = (i < v) & (keys == edge)
            number = seen + tl.cumsum(tied.to(tl.int32), 0)
            weights = tl.exp((x - best) / temperature)
            kept = (i < v) & ((keys > edge) | (tied & (number <= ties))) & (weights >= min_p)
            weights = tl.where(kept, weights, 0.0)
            seen += tl.sum(tied.to(tl.int32), 0)
            if walk == 1:
                running = passed + tl.cumsum(weights, 0).to(tl.float64)
                picked = tl.minimum(picked, tl.min(tl.where(running > target, i, 0x7FFFFFFF), 0))
                last = tl.maximum(last, tl.max(tl.where(weights > 0.0, i, 0), 0))
            passed += tl.sum(weights, 0).to(tl.float64)
        whole = passed
        # rounding may leave the running sum short of the target: the last token that has a weight
        token = tl.where(picked == 0x7FFFFFFF, last, picked)
    tl.store(token_ptr + r, token.to(tl.int64))
