"""The rows that a step draws, as arrays for the device's sampler and its penalties, and what comes back of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_backend.runner.base import ScheduledSequence
from paged_backend.runner.sampler import Sampled, SampleRow, not_finite, penalised, uniform


def is_decode(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Every sequence computes one token and draws one."""
    return all(len(s.token_ids) == 1 and len(s.rows) == 1 and not s.scored_ids for s in scheduled)


def rows_of(scheduled: Sequence[ScheduledSequence]) -> tuple[list[SampleRow], list[int]]:
    """All rows to draw, and for each the row of the logits that it is drawn from."""
    rows: list[SampleRow] = []
    picks: list[int] = []
    first = 0
    for sequence in scheduled:
        first += len(sequence.logit_rows)
        rows.extend(sequence.rows)
        picks.extend([first - 1] * len(sequence.rows))
    return rows, picks


def sampling_columns(rows: Sequence[SampleRow]) -> dict[str, np.ndarray[Any, Any]]:
    """The arguments of ``TritonKernels.sample`` for rows that only truncate."""
    count = len(rows)
    return {
        "temperature": np.fromiter(
            (0 if r.params.greedy else r.params.temperature for r in rows), np.float32, count
        ),
        "top_k": np.fromiter((r.params.top_k or 0 for r in rows), np.int32, count),
        "top_p": np.fromiter((r.params.top_p for r in rows), np.float32, count),
        "min_p": np.fromiter((r.params.min_p or 0 for r in rows), np.float32, count),
        "noise": np.fromiter(
            (0.0 if r.params.greedy else uniform(r.seed, r.num_output_tokens) for r in rows),
            np.float64,
            count,
        ),
    }


def penalty_columns(scheduled: Sequence[ScheduledSequence]) -> dict[str, np.ndarray[Any, Any]]:
    """The arguments of ``TritonKernels.penalise`` for all rows of ``scheduled``; prompt_lens is -1 for one without."""
    rows = [(i, sequence, row) for i, sequence in enumerate(scheduled) for row in sequence.rows]
    count = len(rows)

    def prompt_len(sequence: ScheduledSequence, row: SampleRow) -> int:
        return sequence.end - row.num_output_tokens if penalised(row) else -1

    return {
        "sequences": np.fromiter((i for i, _, _ in rows), np.int32, count),
        "prompt_lens": np.fromiter((prompt_len(sequence, row) for _, sequence, row in rows), np.int32, count),
        "repetition": np.fromiter((row.params.repetition_penalty for _, _, row in rows), np.float32, count),
        "frequency": np.fromiter((row.params.frequency_penalty for _, _, row in rows), np.float64, count),
        "presence": np.fromiter((row.params.presence_penalty for _, _, row in rows), np.float64, count),
    }


def sampled_of(tokens: Sequence[int]) -> list[Sampled | Exception]:
    return [Sampled(token) if token >= 0 else not_finite() for token in tokens]
