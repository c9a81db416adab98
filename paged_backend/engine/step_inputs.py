"""What a request asks of the runner in one step: its next tokens, and what is to be drawn and scored from them."""

from __future__ import annotations

import numpy as np

from paged_backend.batch import SequenceSlice
from paged_backend.engine.request import Request
from paged_backend.runner.base import Work
from paged_backend.runner.sampler import SampleRow


def work_of(request: Request, count: int) -> Work:
    """The next ``count`` tokens of ``request``, whose blocks are reserved."""
    start = request.num_computed
    tokens = request.token_ids[start : start + count]
    score_from, score_to = scored_positions(request, count)
    rows = list(range(score_from - 1 - start, score_to - 1 - start))
    scored = request.token_ids[score_from:score_to]
    samples: list[SampleRow] = []
    if count == request.num_pending:
        rows.append(count - 1)
        # samples that are still to be forked off draw from the same logits, each with its own seed
        width = 1 if request.group is not None else request.seats
        samples = [_sample_row(request, i) for i in range(width)]
    block_ids = np.array(request.table.block_ids, np.int32)
    piece = SequenceSlice(tokens, start, block_ids, rows)
    return Work(piece, samples, scored, request.params.prompt_logprobs or 0)


def scored_positions(request: Request, count: int) -> tuple[int, int]:
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
        request.token_ids[: request.num_prompt_tokens] if _needs_history(request) else [],
        request.output_token_ids,
        seed,
        request.stop_ids,
        request.bad_words_ids,
        request.constraint,
        candidates=request.group.num_candidates if request.group is not None else 0,
    )


def _needs_history(request: Request) -> bool:
    params = request.params
    return params.repetition_penalty != 1.0 or bool(request.bad_words_ids or params.logits_processors)
