"""Pieces: a text that grows at its end. Adding to a string attribute copies all of it each time."""

from __future__ import annotations


class Pieces:
    """O(length of the piece) per :meth:`add`; ``str()`` joins what came since the last time."""

    __slots__ = ("_parts",)

    def __init__(self, text: str = "") -> None:
        self._parts = [text] if text else []

    def add(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __str__(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def take(self) -> str:
        """All of it, and begin anew."""
        text = str(self)
        self._parts = []
        return text
