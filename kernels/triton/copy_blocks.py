"""Copying whole KV blocks in every layer at once, for copy-on-write.

One program copies WORDS 4-byte words of one block of one tensor; the tensors are found through a table of their
addresses, so that all layers take one launch (a cache of codes two, as scales are of another size). 2 * (bytes of a
block over all layers) per pair, no arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_blocks(tensors, pairs, words, WORDS: tl.constexpr):
    """Programs (pairs, tensors, ceil(words / WORDS)). tensors int64 [N]: addresses. pairs int64 [P, 2]: from, to.

    words: 4-byte words of a block. No block may be both a source and a destination: programs run in any order.
    """
    pair = tl.program_id(0)
    base = tl.load(tensors + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    source = tl.load(pairs + 2 * pair)
    destination = tl.load(pairs + 2 * pair + 1)
    i = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = i < words
    tl.store(base + destination * words + i, tl.load(base + source * words + i, mask=inside), mask=inside)
