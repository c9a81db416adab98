"""Batch: the flat arrays of one step, built once by the runner from what the scheduler picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_backend.kernels.array import Array
from paged_backend.kernels.base import AttentionInputs, Kernels
from paged_backend.sequence_slice import SequenceSlice


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids, positions: int64 [T]. logit_rows: int64 [R], rows of the flat batch whose logits are wanted."""

    input_ids: Array
    positions: Array
    logit_rows: Array
    attention: AttentionInputs

    def on(self, kernels: Kernels) -> Batch:
        """The same arrays where ``kernels`` compute."""
        there, attention = kernels.to_device, self.attention
        return Batch(
            there(self.input_ids),
            there(self.positions),
            there(self.logit_rows),
            AttentionInputs(
                there(attention.query_start_loc),
                there(attention.seq_lens),
                there(attention.block_table),
                there(attention.slot_mapping),
            ),
        )

    @classmethod
    def build(cls, slices: Sequence[SequenceSlice], block_size: int) -> Batch:
        """Concatenate ``slices`` (at least one, each with at least one token) into flat arrays."""
        count = len(slices)
        query_lens = np.fromiter((len(s.token_ids) for s in slices), np.int32, count)
        starts = np.fromiter((s.start for s in slices), np.int64, count)
        query_start_loc = np.zeros(count + 1, np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        total = int(query_start_loc[-1])

        input_ids = np.fromiter((t for s in slices for t in s.token_ids), np.int64, total)
        rows = np.repeat(np.arange(count), query_lens)
        positions = np.arange(total) - np.repeat(query_start_loc[:-1], query_lens) + starts[rows]

        width = max(len(s.block_ids) for s in slices)
        table = np.zeros((count, width), np.int32)
        for i, s in enumerate(slices):
            table[i, : len(s.block_ids)] = s.block_ids
        slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

        logit_rows = np.fromiter(
            (int(query_start_loc[i]) + r for i, s in enumerate(slices) for r in s.logit_rows), np.int64
        )
        lens = (starts + query_lens).astype(np.int32)
        return cls(input_ids, positions, logit_rows, AttentionInputs(query_start_loc, lens, table, slots))
