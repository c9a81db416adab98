"""CallScanner: reads the JSON of one tool call as it comes and gives out the arguments before the call is complete."""

from __future__ import annotations

import json
import re
from typing import Any

from paged_backend.text.pieces import Pieces

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", "function", *_ARGUMENTS)
_STRUCTURE = re.compile(r'["{}\[\],:]')
_IN_STRING = re.compile(r'["\\]')


class CallScanner:
    """Linear in the length of the call, in pieces of any size.

    arguments_key: the one that the format writes; the other common spelling is understood as well. name: given where
    the text holds nothing but the arguments. keep: whether an object that turns out to be no call is to be
    ``rejected``, its ``text`` being content, rather than taken for a broken call.
    """

    def __init__(self, arguments_key: str, name: str | None = None, keep: bool = False) -> None:
        self.name = name
        self.done = False
        self.rejected = False
        self.streamed = False
        self._only_arguments = name is not None
        self._keys = (arguments_key, *(key for key in _ARGUMENTS if key != arguments_key))
        self._keep = keep
        self._text = Pieces()
        self._arguments = Pieces()
        self._untaken = Pieces()
        self._open = self._only_arguments  # whether what comes belongs to the arguments
        self._begun = self._open
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._literal: Pieces | None = None  # a string that may be a key or a name, with its quotes
        self._key: str | None = None
        self._is_key = True

    @property
    def text(self) -> str:
        """All that was read."""
        return str(self._text)

    def push(self, text: str) -> int:
        """Read up to the end of the object; returns how many characters of ``text`` belong to it."""
        at = start = 0  # of the arguments that are open, in this piece
        while at < len(text) and not (self.done or self.rejected):
            if self._in_string:
                at = self._string(text, at)
                continue
            found = _STRUCTURE.search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            before = self._open
            self._structure(found[0])
            if self._open and not before:
                start = at - 1
            elif before and not self._open:
                self._argue(text[start:at])
        if self._open:
            self._argue(text[start:at])
        self._text.add(text[:at])
        return at

    def take(self) -> str:
        """Arguments read since the last call."""
        taken = self._untaken.take()
        self.streamed = self.streamed or bool(taken)
        return taken

    def result(self) -> tuple[str, str]:
        """(arguments as JSON text, what is wrong with the call or "")."""
        raw, text = str(self._arguments), self.text
        try:
            call: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            return raw or text, f"it is not valid JSON: {error}"
        if self._only_arguments:
            return text, ""
        name = call.get("name")
        if not isinstance(name, str) or not name:
            return raw or text, "it has no name"
        value: Any = next((call[key] for key in self._keys if key in call), {})
        if isinstance(value, str):  # arguments as a string of JSON
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                return str(value), f"its arguments are not valid JSON: {error}"
        if value is None:
            value = {}
        if not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False), "its arguments are not an object"
        return raw or json.dumps(value, ensure_ascii=False), ""

    def _argue(self, text: str) -> None:
        self._arguments.add(text)
        self._untaken.add(text)

    def _structure(self, char: str) -> None:
        if char == '"':
            self._in_string = True
            if self._depth == 1 and not self._only_arguments:
                self._literal = Pieces('"')
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and not self._begun and not self._is_key:
                self._open = self._begun = self._key in self._keys
        elif char in "}]":
            self._depth -= 1
            if self._depth == (0 if self._only_arguments else 1):
                self._open = False
            self.done = self._depth == 0
            if self.done and self._keep and self.name is None:
                self.done, self.rejected = False, True
        elif self._depth == 1:
            self._is_key = char == ","

    def _string(self, text: str, at: int) -> int:
        """Read on in a string; returns where to go on."""
        start = at
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = _IN_STRING.search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            if found[0] == '"':
                self._in_string = False
                break
            self._escaped = True
        if self._literal is not None:
            self._literal.add(text[start:at])
            if not self._in_string:
                literal, self._literal = str(self._literal), None
                self._end_string(literal)
        return at

    def _end_string(self, literal: str) -> None:
        if not self._is_key and self._key != "name":
            return
        try:
            value: Any = json.loads(literal)
        except ValueError:
            return
        if self._is_key:
            self._key = value
            self.rejected = self._keep and value not in _KEYS
        else:
            self.name = value
