"""Lark grammars as the compiler takes them: literals, regexes that mean ASCII, JSON spaced as everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paged_backend.constrain.regex import regex_words

# strings, comments, regexes and what comes before an embedded schema: whatever could hide one of the others
_TOKENS = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<comment>//[^\n]*)|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)'
    r"|(?P<json>%json\s*)(?=\{)"
)


def lark_text(text: str) -> str:
    """A literal of a Lark grammar. Raises ``ValueError`` for text that cannot be encoded."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"{text!r:.60} has half a surrogate pair, which no text can be held to")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which JSON leaves as it is


def lark_words(text: str) -> list[str]:
    """Texts that the terminals of a Lark grammar match."""
    found = []
    for token in _TOKENS.finditer(text):
        if token["regex"] is not None:
            found += regex_words(token["regex"])
        elif token["text"] is not None:
            with suppress(ValueError):
                found.append(json.loads(token["text"]))
    return [word for word in found if word]


def lark_grammar(text: str, spacing: Mapping[str, Any]) -> str:
    """Lark whose ``\\d``, ``\\w`` and ``\\s`` are ASCII and whose schemas are spaced; GBNF (known by ``::=``) in Lark.

    Raises ``ValueError`` for GBNF that cannot be read.
    """
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if "::=" in text:
        try:
            text = any_to_lark(text)
        except Exception as error:
            raise ValueError(f"the GBNF grammar cannot be read: {error}") from error
    written = []
    at = 0
    while (token := _TOKENS.search(text, at)) is not None:
        written.append(text[at : token.start()])
        at = token.end()
        if token["regex"] is not None:
            asked = "u" in token["flags"] or token["regex"].startswith("(?u)")
            regex = token["regex"] if asked else regex_to_lark(token["regex"], "dws")
            written.append(f"/{regex}/{token['flags']}")
        elif token["json"] is not None:
            schema, at = json.JSONDecoder().raw_decode(text, at)
            written.append(f"%json {json.dumps({'x-guidance': spacing, **schema}, ensure_ascii=False)}")
        else:
            written.append(token[0])
    return "".join([*written, text[at:]])
