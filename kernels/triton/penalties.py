"""Repetition, frequency and presence penalties on the device, from the token ids that lie beside the KV cache.

A sequence's tokens are found as attention finds its keys: through its block table, in a memory with one id per slot. So
a prefix that another request has computed, a copied block and a token that the step before has just drawn are all
there, and the host need not know any of them. Definitions are those of ``runner.sampler``.

``count_tokens`` reads 8 bytes per token of context and writes at random into a table of 4 bytes per token of the
vocabulary, with integer atomics, whose order does not show in the result. ``penalise`` reads that table and the logits
and writes the logits: 12 bytes per token of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

PROMPT = tl.constexpr(1 << 30)
"""Bit of a count: the token stands in the prompt. The bits below count it in the output."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What the R rows of a step are penalised by; all on the device.

    block_table int32 [S, B], seq_lens int32 [S]: of the step's sequences, and longest at least the largest of these.
    sequences, prompt_lens int32 [R]: which sequence a row draws for, and how many of its tokens are its prompt; -1: not
    penalised. repetition float32 [R]; frequency, presence float64 [R].
    """

    block_table: Tensor
    seq_lens: Tensor
    longest: int
    sequences: Tensor
    prompt_lens: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@triton.jit(do_not_specialize=["table_stride"])
def count_tokens(
    counts, ids, block_table, table_stride, seq_lens, sequences, prompt_lens, v,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (rows, ceil(longest context / BLOCK)). counts int32 [R, v], zero before.

    ids int64 [slots]: the token of each slot. The others: see :class:`Penalties`.
    """
    row = tl.program_id(0)
    prompt = tl.load(prompt_lens + row)
    sequence = tl.load(sequences + row)
    length = tl.load(seq_lens + sequence)
    first = tl.program_id(1) * BLOCK
    if (prompt < 0) | (first >= length):
        return
    position = first + tl.arange(0, BLOCK)
    inside = position < length
    at = block_table + sequence.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(at, mask=inside, other=0).to(tl.int64)
    token = tl.load(ids + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside, other=-1)
    inside = inside & (token >= 0) & (token < v)  # what is no token of the vocabulary has no logit to change
    to = counts + row.to(tl.int64) * v + tl.where(inside, token, 0)
    tl.atomic_or(to, PROMPT, mask=inside & (position < prompt))
    tl.atomic_add(to, 1, mask=inside & (position >= prompt))


@triton.jit
def penalise(
    logits, counts, prompt_lens, repetition, frequency, presence, v, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs (rows, ceil(v / BLOCK)). logits float32 [R, v] with the given row stride, changed in place.

    counts: of :func:`count_tokens`. The others: see :class:`Penalties`.
    """
    row = tl.program_id(0)
    if tl.load(prompt_lens + row) < 0:
        return
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row.to(tl.int64) * stride + i
    x = tl.load(at, mask=i < v, other=0.0)
    count = tl.load(counts + row.to(tl.int64) * v + i, mask=i < v, other=0)
    factor = tl.load(repetition + row)
    repeated = tl.where(x < 0, x * factor, tl.math.div_rn(x, factor))
    x = tl.where(count != 0, repeated, x)
    made = count & (PROMPT - 1)
    less = (tl.load(frequency + row) * made.to(tl.float64) + tl.load(presence + row)).to(tl.float32)
    tl.store(at, tl.where(made > 0, x - less, x), mask=i < v)
