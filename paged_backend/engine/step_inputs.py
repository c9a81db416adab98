"""What a request asks of the runner in one step: its next tokens, and what is to be drawn and scored from them."""

from __future__ import annotations

import numpy as np

from paged_backend.engine.request import Request
from paged_backend.runner.base import ScheduledSequence
from paged_backend.runner.sampler import SampleRow


def scheduled_sequence(request: Request, count: int) -> ScheduledSequence:
    """The next ``count`` tokens of ``request``, whose blocks are reserved."""
    start = request.num_computed
    tokens = request.token_ids[start : start + count]
    score_from, score_to = _scored_positions(request, count)
    logit_rows = list(range(score_from - 1 - start, score_to - 1 - start))
    scored = request.token_ids[score_from:score_to]
    rows: list[SampleRow] = []
    if count == request.num_pending:
        logit_rows.append(count - 1)
        # samples that are still to be forked off draw from the same logits, each with its own seed
        width = 1 if request.group is not None else request.seats
        rows = [_sample_row(request, i) for i in range(width)]
    block_ids = np.array(request.table.block_ids, np.int32)
    return ScheduledSequence(
        tokens, start, block_ids, logit_rows, rows, scored, request.params.prompt_logprobs or 0
    )


def _scored_positions(request: Request, count: int) -> tuple[int, int]:
    """Prompt positions (first, end) whose logprobs this step can give: their predecessors are computed in it."""
    if request.params.prompt_logprobs is None:
        return 0, 0
    first = max(request.num_scored, request.num_computed + 1)
    end = min(request.num_prompt_tokens, request.num_computed + count + 1)
    return (first, end) if end > first else (0, 0)


def _sample_row(request: Request, sample: int) -> SampleRow:
    seed = request.params.child_seed(request.seed, sample) if sample else request.seed
    return SampleRow(
        request.params,
        request.history,
        request.num_output_tokens,
        seed,
        request.stop_ids,
        request.bad_words_ids,
        request.constraint,
        candidates=request.group.num_candidates if request.group is not None else 0,
    )
