"""CallScanner: reads the JSON of one tool call as it comes and gives out the arguments before the call is complete."""

from __future__ import annotations

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", "function", *_ARGUMENTS)


class CallScanner:
    """arguments_key: the one that the format writes; the other common spelling is understood as well.

    name: given where the text holds nothing but the arguments. keep: whether an object that turns out to be no call is
    to be ``rejected``, its ``text`` being content, rather than taken for a broken call.
    """

    def __init__(self, arguments_key: str, name: str | None = None, keep: bool = False) -> None:
        self.name = name
        self.text = ""
        self.done = False
        self.rejected = False
        self.streamed = False
        self._only_arguments = name is not None
        self._keys = (arguments_key, *(key for key in _ARGUMENTS if key != arguments_key))
        self._keep = keep
        self._depth = 0
        self._string_start: int | None = None
        self._escaped = False
        self._key: str | None = None
        self._is_key = True
        self._arguments_start: int | None = 0 if name is not None else None
        self._arguments_end: int | None = None
        self._taken = 0

    def push(self, text: str) -> int:
        """Read up to the end of the object; returns how many characters of ``text`` belong to it."""
        for count, char in enumerate(text, 1):
            self.text += char
            self._read(char)
            if self.done or self.rejected:
                return count
        return len(text)

    def take(self) -> str:
        """Arguments read since the last call."""
        if self._arguments_start is None:
            return ""
        end = len(self.text) if self._arguments_end is None else self._arguments_end
        start = self._arguments_start + self._taken
        self._taken = end - self._arguments_start
        self.streamed = self.streamed or end > start
        return self.text[start:end]

    def result(self) -> tuple[str, str]:
        """(arguments as JSON text, what is wrong with the call or "")."""
        raw = self._raw_arguments()
        try:
            call: Any = json.loads(self.text)
        except ValueError as error:
            return raw or self.text, f"it is not valid JSON: {error}"
        if self._only_arguments:
            return self.text, ""
        name = call.get("name")
        if not isinstance(name, str) or not name:
            return raw or self.text, "it has no name"
        value: Any = next((call[key] for key in self._keys if key in call), {})
        if isinstance(value, str):  # arguments as a string of JSON
            try:
                value = json.loads(value)
            except ValueError as error:
                return str(value), f"its arguments are not valid JSON: {error}"
        if value is None:
            value = {}
        if not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False), "its arguments are not an object"
        return raw or json.dumps(value, ensure_ascii=False), ""

    def _raw_arguments(self) -> str:
        if self._arguments_start is None:
            return ""
        return self.text[self._arguments_start : self._arguments_end]

    def _read(self, char: str) -> None:
        here = len(self.text) - 1
        if self._string_start is not None:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._end_string(self.text[self._string_start : here + 1])
                self._string_start = None
        elif char == '"':
            self._string_start = here
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and self._key in self._keys and not self._is_key:
                self._arguments_start = here
                self._arguments_end = None
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self._arguments_start is not None and self._arguments_end is None:
                self._arguments_end = here + 1
            self.done = self._depth == 0
            if self.done and self._keep and self.name is None:
                self.done, self.rejected = False, True
        elif self._depth == 1 and char in ",:":
            self._is_key = char == ","

    def _end_string(self, literal: str) -> None:
        if self._depth != 1 or self._only_arguments:
            return
        try:
            value: Any = json.loads(literal)
        except ValueError:
            return
        if self._is_key:
            self._key = value
            self.rejected = self._keep and value not in _KEYS
        elif self._key == "name":
            self.name = value
