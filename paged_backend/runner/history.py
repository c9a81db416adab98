"""TokenHistory: the tokens of one sequence as a sampler asks for them. What was counted once is not counted again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from paged_backend.kernels.array import Array


class TokenHistory:
    """token_ids: the sequence's own list, prompt first, to which tokens are added; only read here.

    A row says how many tokens of output it sees: the list may be further by the time it is sampled.
    """

    __slots__ = ("_context", "_output", "num_prompt_tokens", "token_ids")

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self._context: _Tally | None = None
        self._output: _Tally | None = None

    def prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    def output(self, count: int) -> list[int]:
        """Its first ``count`` tokens."""
        return self.token_ids[self.num_prompt_tokens : self.num_prompt_tokens + count]

    def ends_with(self, words: Sequence[int], count: int) -> bool:
        """Whether prompt and ``count`` tokens of output end with ``words``."""
        end = self.num_prompt_tokens + count
        return len(words) <= end and self.token_ids[end - len(words) : end] == list(words)

    def context_ids(self, count: int) -> Array:
        """int64 [n]: the different ids in prompt and ``count`` tokens of output."""
        if self._context is None:
            self._context = _Tally(0)
        return self._context.to(self.token_ids, self.num_prompt_tokens + count)[0]

    def output_counts(self, count: int) -> tuple[Array, Array]:
        """(int64 [n], int64 [n]): the different ids in ``count`` tokens of output, and how often each is there."""
        if self._output is None:
            self._output = _Tally(self.num_prompt_tokens)
        return self._output.to(self.token_ids, self.num_prompt_tokens + count)


class _Tally:
    """How often each id is in a list of tokens from ``start`` on, as far as anybody has asked."""

    def __init__(self, start: int) -> None:
        self._start = self._end = start
        self._place: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("q")

    def to(self, token_ids: Sequence[int], end: int) -> tuple[Array, Array]:
        if end < self._end:
            self.__init__(self._start)  # type: ignore[misc]
        for token in token_ids[self._end : end]:
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1
        self._end = max(self._end, end)
        return np.array(self._ids), np.array(self._counts)
