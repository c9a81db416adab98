"""StopMatcher: finds stop strings in streamed text, however tokens cut it up.

One Knuth-Morris-Pratt automaton per stop string runs over the characters. Its state, how much of the string
the text now ends with, is at once the detector and the shortest possible hold-back: only a suffix that is a
proper prefix of some stop string may still turn out to belong to one.

Text may be hidden: that of special tokens, which nobody is shown, but which a stop string may ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class StopMatcher:
    """Feed it text with :meth:`push`; what it returns is safe to show.

    The match that completes first wins; of several that complete on the same character, the longest. So the
    result does not depend on how the text was cut. stops: non-empty strings (ValueError otherwise).
    include_in_output: whether the stop string itself is part of the emitted text. through_hidden: those of the
    stops that are found in the text with its hidden parts; all others in what is shown.
    """

    __slots__ = (
        "_failures",
        "_first",
        "_held",
        "_hidden",
        "_include",
        "_states",
        "_stops",
        "_through",
        "matched",
    )

    def __init__(
        self, stops: Sequence[str], include_in_output: bool = False, through_hidden: Collection[str] = ()
    ) -> None:
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._through = tuple(stop in through_hidden for stop in self._stops)
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include_in_output
        self._held = ""
        self._hidden: list[bool] = []  # for each character held, whether it is; empty: none is
        self.matched: str | None = None
        """The stop string that ended the text; everything pushed later is ignored."""

    def push(self, text: str, can_stop: bool = True, hidden: bool = False) -> tuple[str, str | None]:
        """Take in new text; returns (text to emit, the stop string found in it or None).

        can_stop: False for the text of the first min_tokens tokens. As in vLLM no match completes in it, but
        one that completes later may begin in it. hidden: it is never emitted.
        """
        if self.matched is not None or not self._stops:
            return ("" if self.matched is not None or hidden else text), None
        if not self._held and self._first.isdisjoint(text):
            return "" if hidden else text, None
        buffer, start = self._held + text, len(self._held)
        mask = self._hidden
        if hidden or mask:
            mask = (mask or [False] * start) + [hidden] * len(text)
        for end, char in enumerate(text, start + 1):
            for i, stop in enumerate(self._stops):
                if hidden and not self._through[i]:
                    continue
                state = self._advance(i, char)
                if state == len(stop):
                    if can_stop:
                        first = self._begin(i, state, end, mask)
                        self.matched, self._held, self._hidden = stop, "", []
                        return _shown(buffer, end if self._include else first, mask), stop
                    state = self._failures[i][-1]
                self._states[i] = state
        keep = min(self._begin(i, state, len(buffer), mask) for i, state in enumerate(self._states))
        self._held, self._hidden = buffer[keep:], mask[keep:]
        return _shown(buffer, keep, mask), None

    def flush(self) -> str:
        """The text still held back, once no more can come."""
        held = _shown(self._held, len(self._held), self._hidden)
        self._held, self._hidden = "", []
        self._states = [0] * len(self._stops)
        return held

    def _begin(self, i: int, state: int, end: int, mask: Sequence[bool]) -> int:
        """Where the ``state`` characters of stop ``i`` begin that lie before ``end``."""
        if self._through[i] or not mask:
            return end - state
        while state:
            end -= 1
            state -= not mask[end]
        return end

    def _advance(self, i: int, char: str) -> int:
        stop, failure, state = self._stops[i], self._failures[i], self._states[i]
        while state and stop[state] != char:
            state = failure[state - 1]
        return state + 1 if stop[state] == char else 0


def _shown(text: str, end: int, mask: Sequence[bool]) -> str:
    if not mask:
        return text[:end]
    return "".join(char for char, hidden in zip(text[:end], mask) if not hidden)


def overlap(text: str, other: str) -> bool:
    """Whether some text holds both strings with at least one character in common."""
    if text in other or other in text:
        return True
    sizes = range(1, min(len(text), len(other)))
    return any(text.endswith(other[:size]) or other.endswith(text[:size]) for size in sizes)


def _failure(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
