"""StopMatcher: finds stop strings in streamed text, however tokens cut it up.

One Knuth-Morris-Pratt automaton per stop string runs over the characters. Its state, how much of the string
the text now ends with, is at once the detector and the shortest possible hold-back: only a suffix that is a
proper prefix of some stop string may still turn out to belong to one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it text with :meth:`push`; what it returns is safe to show.

    The match that completes first wins; of several that complete on the same character, the longest. So the
    result does not depend on how the text was cut. stops: non-empty strings (ValueError otherwise).
    include_in_output: whether the stop string itself is part of the emitted text.
    """

    __slots__ = ("_failures", "_first", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; everything pushed later is ignored."""

    def push(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """Take in new text; returns (text to emit, the stop string found in it or None).

        can_stop: False for the text of the first min_tokens tokens. As in vLLM no match completes in it, but
        one that completes later may begin in it.
        """
        if self.matched is not None or not self._stops:
            return ("" if self.matched is not None else text), None
        if not self._held and self._first.isdisjoint(text):
            return text, None
        buffer, start = self._held + text, len(self._held)
        for end, char in enumerate(text, start + 1):
            for i, stop in enumerate(self._stops):
                state = self._advance(i, char)
                if state == len(stop):
                    if can_stop:
                        self.matched, self._held = stop, ""
                        return buffer[: end if self._include else end - len(stop)], stop
                    state = self._failures[i][-1]
                self._states[i] = state
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """The text still held back, once no more can come."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, i: int, char: str) -> int:
        stop, failure, state = self._stops[i], self._failures[i], self._states[i]
        while state and stop[state] != char:
            state = failure[state - 1]
        return state + 1 if stop[state] == char else 0


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
