"""Batch: the flat arrays of one step, built once by the runner from what the scheduler picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs
from paged_backend.sequence_slice import SequenceSlice


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids, positions: int64 [T]. logit_rows: int64 [R], rows of the flat batch whose logits are wanted."""

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionInputs

    def to(self, device: torch.device) -> Batch:
        """The same arrays on ``device``."""
        attention = self.attention
        return Batch(
            self.input_ids.to(device),
            self.positions.to(device),
            self.logit_rows.to(device),
            AttentionInputs(
                attention.query_start_loc.to(device),
                attention.seq_lens.to(device),
                attention.block_table.to(device),
                attention.slot_mapping.to(device),
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
        return cls(
            torch.from_numpy(input_ids),
            torch.from_numpy(positions),
            torch.from_numpy(logit_rows),
            AttentionInputs(
                torch.from_numpy(query_start_loc),
                torch.from_numpy((starts + query_lens).astype(np.int32)),
                torch.from_numpy(table),
                torch.from_numpy(slots),
            ),
        )
