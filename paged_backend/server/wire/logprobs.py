"""Log-probabilities in the shapes of OpenAI's two generation APIs, and vLLM's of the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from openai.types.completion_choice import Logprobs

from paged_backend.outputs import Logprob
from paged_backend.text.detokenizer import IncrementalDetokenizer
from paged_backend.tokenization import Decoder

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""
Entry = Mapping[int, Logprob]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def spelled(token: int, item: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else item.token


def chat_logprobs(entries: Sequence[Entry], count: int, as_ids: bool = False) -> list[dict[str, Any]]:
    """One item per token: the sampled one, with the ``count`` most likely; -1 for all there are."""

    def told(token: int, item: Logprob) -> dict[str, Any]:
        return {
            "token": spelled(token, item, as_ids),
            "logprob": finite(item.logprob),
            "bytes": list(item.utf8),
        }

    items = []
    for entry in entries:
        listed = list(entry.items())
        likely = sorted(listed, key=lambda pair: pair[1].rank or 0)[: _slice_end(count)]
        items.append({**told(*listed[0]), "top_logprobs": [told(*other) for other in likely]})
    return items


def _slice_end(count: int) -> int | None:
    return None if count < 0 else count


class CompletionLogprobs:
    """Builds the ``logprobs`` of one choice of /v1/completions, piece by piece.

    Offsets count the characters that the choice's text has before a token. tokenizer, context: what the tokens follow.
    """

    def __init__(self, tokenizer: Decoder, context: Sequence[int], as_ids: bool, skip_special: bool) -> None:
        self._as_ids = as_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, context, skip_special)
        self._offset = 0

    def add(self, tokens: Sequence[int], entries: Sequence[Entry | None], count: int) -> Logprobs:
        """The next tokens; an entry is None for the first of a prompt, which nothing precedes."""
        logprobs = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        texts, values, tops, offsets = (
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset,
        )  # fmt: skip
        if texts is None or values is None or tops is None or offsets is None:
            raise TypeError("the lists were given")
        for token, entry in itertools.zip_longest(tokens, entries):
            offsets.append(self._offset)
            piece = self._detokenizer.push(token)
            self._offset += len(piece)
            if entry is None:
                texts.append(f"token_id:{token}" if self._as_ids else piece)
                values.append(None)  # type: ignore[arg-type]  # as OpenAI's API does
                tops.append(None)  # type: ignore[arg-type]
                continue
            texts.append(spelled(token, entry[token], self._as_ids))
            values.append(finite(entry[token].logprob))
            likely = sorted(entry.items(), key=lambda pair: pair[1].rank or 0)[: _slice_end(count)]
            # the token itself is always listed, and under its own name
            listed = {token: entry[token], **dict(likely)}
            names = {texts[-1]: token}
            for other, item in likely:
                if names.setdefault(spelled(other, item, self._as_ids), other) != other:
                    names[f"token_id:{other}"] = other  # two tokens that are spelled alike
            tops.append(
                {
                    name: finite(listed[other].logprob)
                    for name, other in sorted(names.items(), key=lambda pair: listed[pair[1]].rank or 0)
                }
            )
        return logprobs


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: one {token id: {logprob, rank, decoded_token}} per token of the prompt."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(item.logprob),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token, item in entry.items()
        }
        for entry in entries
    ]
