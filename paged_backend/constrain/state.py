"""GrammarState: where one sequence stands in its grammar, and that it can still be completed in time.

A sampled token passes only if the output can be completed behind it within ``max_tokens``; otherwise the first token of
a known closing path takes its place (``closing.py``). So the invariant "remaining tokens >= length of the known path"
holds from submit to the end, and every constrained output is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from paged_backend.constrain.closing import ClosingOrder, Words, allowed_tokens, find_closing
from paged_backend.errors import RequestFailedError

Array = np.ndarray[Any, Any]
SEARCH_LIMIT, BROAD_LIMIT = 1024, 1 << 14
"""Longest path to an end that is looked for while an output grows, and at its start."""
_MAX_PATHS = 6  # closing paths a grammar remembers
_NEAR = 16  # tokens that it looks ahead where no path is known


class Closings:
    """What the sequences of one grammar share: how to search for an end, and paths that were found useful."""

    def __init__(self, order: ClosingOrder, words: Words, eos: int) -> None:
        self.order = order
        self.words = words
        self.eos = eos
        self.paths: tuple[tuple[int, ...], ...] = ()

    def find(self, matcher: Any, limit: int = BROAD_LIMIT, *, broad: bool = True) -> list[int] | None:
        return find_closing(
            matcher, self.order, self.words, min(limit, BROAD_LIMIT if broad else SEARCH_LIMIT), broad=broad
        )

    def remember(self, path: Sequence[int]) -> None:
        """Keep a path for :meth:`GrammarState.settle` to try first."""
        new = tuple(path)
        if new and new not in self.paths:
            self.paths = (new, *self.paths[: _MAX_PATHS - 1])


class GrammarState:
    """Where one sequence stands. Used by the engine's loop thread, and by its mask thread while a step computes."""

    __slots__ = (
        "_closings",
        "_future",
        "_ignored",
        "_mask",
        "_matcher",
        "_next",
        "_path",
        "_remaining",
        "_stop_ids",
    )  # fmt: skip

    def __init__(
        self,
        closings: Closings,
        matcher: Any,
        path: list[int] | None,
        max_tokens: int,
        stop_ids: tuple[int, ...],
        ignored_ids: tuple[int, ...],
    ) -> None:
        self._closings = closings
        self._matcher = matcher
        self._path = path
        self._remaining = max_tokens
        self._stop_ids = stop_ids
        self._ignored = ignored_ids
        self._mask: Array | None = None
        self._future: Future[Array] | None = None
        self._next: tuple[int, list[int] | None] | None = None

    def fork(self) -> GrammarState:
        """A second sequence that goes on from here."""
        self._wait()
        copy = self._matcher.deep_copy()
        return GrammarState(self._closings, copy, self._path, self._remaining, self._stop_ids, self._ignored)

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the output is complete and must stop."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """Whether the output as it stands satisfies the grammar."""
        return self._matcher.is_accepting()

    def prepare(self, pool: Executor) -> None:
        """Fill the mask in ``pool`` while the caller does something else; :meth:`mask` waits for it."""
        if self._mask is None and self._future is None:
            self._future = pool.submit(self._fill)

    def mask(self) -> Array:
        """Bool over the vocabulary, True where a token may come next. Not to be changed by the caller."""
        if self._mask is None:
            future, self._future = self._future, None
            self._mask = self._fill() if future is None else future.result()
        return self._mask

    def _wait(self) -> None:
        """The matcher has one user at a time: whoever never asked for the mask still lets the filling end."""
        if self._future is not None:
            self.mask()

    def _fill(self) -> Array:
        allowed = allowed_tokens(self._matcher, self._closings.order.size).copy()
        if self._matcher.is_error():
            raise RequestFailedError(f"the grammar cannot go on: {self._matcher.get_error()}")
        # any token that ends the output would cut it, so all of them wait for an allowed end, not only the tokenizer's
        ends = [i for i in self._stop_ids if i < len(allowed)]
        allowed[ends] = self._matcher.is_accepting()
        allowed[[i for i in self._ignored if i < len(allowed)]] = False
        return allowed

    def settle(self, token: int) -> int:
        """``token`` if the output can still be completed in time behind it, else the next token on the way to an end.

        Changes nothing that a second call would notice: a failed step may be sampled again.
        """
        self._wait()
        ends = token in self._stop_ids
        if ends and self._matcher.is_accepting():
            return token
        tight = self._path is not None and 0 < len(self._path) >= self._remaining
        path = None if tight or ends else self._path_behind(token)
        if path is None and self._path is not None:
            if self._path:
                token, path = self._path[0], self._path[1:]
            else:  # complete as it is, and whatever this token begins could not be completed in time
                return self._stop_ids[0] if self._stop_ids else token
        self._next = (token, path)
        return token

    def _path_behind(self, token: int) -> list[int] | None:
        limit = self._remaining - 1
        check, eos = self._matcher.validate_tokens, self._closings.eos
        # cheap guesses first: the known path often still holds (inside a text), or a later part of one
        for known in (self._path or (), *self._closings.paths):
            for start in range(max(0, len(known) - limit), len(known) + 1):
                rest = list(known[start:])
                if check([token, *rest, eos]) == len(rest) + 2:
                    return rest
        after = self._matcher.deep_copy()
        if not after.consume_token(token):
            return None
        if self._path is None:  # not found so far: it may be near by now
            return self._closings.find(after, min(limit, _NEAR), broad=False)
        found = self._closings.find(after, limit, broad=False)
        if found is not None:
            self._closings.remember(found)
        return found

    def advance(self, token: int) -> None:
        """Take in the token that was appended. Raises :class:`RequestFailedError` if the grammar does not allow it."""
        self._wait()
        self._mask = None
        chosen, self._next = self._next, None
        if token in self._stop_ids:
            return
        if not self._matcher.consume_token(token):
            problem = " ".join(self._matcher.get_error().split())[:300]
            raise RequestFailedError(f"the grammar does not allow token {token} here: {problem}")
        self._remaining -= 1
        if chosen is not None and chosen[0] == token:
            self._path = chosen[1]
        else:  # a token that never passed settle: speculated, or forced from outside
            self._path = self._closings.find(self._matcher)

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens (speculation that was not accepted)."""
        self._wait()
        if count and not self._matcher.rollback(count):
            raise RequestFailedError(
                f"the grammar cannot take back {count} tokens: {self._matcher.get_error()}"
            )
        self._remaining += count
        self._mask, self._next = None, None
        self._path = self._closings.find(self._matcher)
