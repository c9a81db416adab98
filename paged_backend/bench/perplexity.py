"""Perplexity of a text, through ``prompt_logprobs``: what a weight format costs in quality."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine


def default_text() -> str:
    """English prose that every Python carries: the language reference behind ``help()``."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(ids: Sequence[int], length: int, limit: int) -> list[list[int]]:
    """The first ``limit`` ids in pieces of ``length``; a rest of one token, which nothing precedes, is left out.

    Raises ValueError for a text or a length that leaves nothing to score.
    """
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, got {length}")
    pieces = [list(ids[at : min(at + length, limit)]) for at in range(0, min(len(ids), limit), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ValueError("the text has fewer than 2 tokens")
    return pieces


def perplexity(engine: Engine, text: str, length: int = 1024, limit: int = 20000) -> tuple[float, int]:
    """(perplexity, number of scored tokens) of the first ``limit`` tokens, each window of ``length`` by itself.

    Raises ValueError for a text or a length that leaves nothing to score.
    """
    from paged_backend.sampling_params import SamplingParams
    from paged_backend.tokenization import needed

    ids = needed(engine.tokenizer).encode(text, add_special_tokens=False)
    pieces = windows(ids, min(length, engine.max_model_len - 1), limit)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    total, count = 0.0, 0
    for piece, handle in zip(pieces, engine.submit_many(prompts, [params] * len(pieces))):
        scored = handle.result().prompt_logprobs or []
        for token, entry in zip(piece[1:], scored[1:]):
            if entry is None:
                raise RuntimeError("a prompt token was not scored")
            total -= entry[token].logprob
            count += 1
    return math.exp(total / count), count
