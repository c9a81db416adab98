"""TokenBytes: the bytes that one token of a vocabulary stands for, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Step = Callable[[str], "str | bytes"]


class TokenBytes:
    """``TokenBytes(backend)(index)``: bytes that, joined over the tokens of a text, are the text in UTF-8.

    Without what a decoder does to a text as a whole: where it takes off a space at the beginning, the first token keeps
    it. Special tokens are what they are decoded to. Unknown ids have no bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._steps = _steps(backend)

    def __call__(self, index: int) -> bytes:
        spelling = self._backend.id_to_token(index) if index >= 0 else None
        if spelling is None:
            return b""
        if self._steps is None:
            return self._backend.decode([index], skip_special_tokens=False).encode()
        for step in self._steps:
            found = step(spelling)
            if isinstance(found, bytes):
                return found
            spelling = found
        return spelling.encode(errors="replace")


def _steps(backend: tokenizers.Tokenizer) -> list[_Step] | None:
    """What the decoder does to each token by itself; None for a decoder that is not known here."""
    if backend.decoder is None:
        return None
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[_Step] = []
    for part in _flat(description):
        made = _step(part)
        if made is None:
            return None
        steps += made
    return steps


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part["decoders"] for inner in _flat(each)]


def _step(part: dict[str, Any]) -> list[_Step] | None:
    kind = part["type"]
    if kind == "ByteLevel":
        return [_byte_level()]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Metaspace":
        mark = part["replacement"]
        return [lambda text: text.replace(mark, " ")]
    if kind == "Replace":
        pattern, content = part["pattern"], part["content"]
        if "String" not in pattern:
            return None
        return [lambda text: text.replace(pattern["String"], content)]
    if kind in ("Strip", "Fuse"):  # of the text as a whole
        return []
    return None


def _byte_fallback(text: str) -> str | bytes:
    found = _BYTE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found is not None else text


def _byte_level() -> _Step:
    """Undoes GPT-2's spelling, in which every byte is one printable character."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})

    def undo(text: str) -> str | bytes:
        try:
            return bytes(table[char] for char in text)
        except KeyError:  # not spelled so: the decoder leaves such a token as it is
            return text

    return undo
