"""JSON schemas made ready for the grammar compiler: closed objects, its dialect of regexes, dates that exist."""

from __future__ import annotations

import json
from typing import Any

from paged_backend.constrain.references import References
from paged_backend.constrain.regex import regex_words, to_grammar_regex

# dates that exist, which the compiler's own grammars for these two do not insist on (they know a 30th of February)
_LEAP = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}
_FORMAT_WORDS = {
    "date-time": ["2000-01-01T00:00:00Z"], "time": ["00:00:00Z"], "date": ["2000-01-01"], "duration": ["P1D"],
    "email": ["a@a"], "hostname": ["a"], "ipv4": ["0.0.0.0"], "ipv6": ["::", "::0"],
    "uuid": ["00000000-0000-0000-0000-000000000000"], "uri": ["a:a", "http://a.aa"],
}  # fmt: skip
_OBJECT_RULES = ("additionalProperties", "patternProperties")
_COMBINERS = ("allOf", "anyOf", "oneOf", "$ref")


def prepare_schema(relaxed: dict[str, Any]) -> dict[str, Any]:
    """``relaxed`` (see ``relax``), changed in place so that its outputs are what a caller means by it.

    Objects that list properties and say nothing of others become closed: JSON Schema would admit any further key, and
    a model that invents keys helps nobody. Left as they are where several schemas speak of one object (``allOf``, or
    properties beside ``anyOf``, ``oneOf`` or ``$ref``), because closing one of them would forbid the others' keys.
    """
    nodes = References(relaxed).applied()
    merges = any(_merges(node) for node in nodes)
    for node in nodes:
        if "pattern" in node:
            node["pattern"] = to_grammar_regex(node["pattern"])
        elif node.get("format") in _PATTERNS:
            node["pattern"] = _PATTERNS[node.pop("format")]
        if "patternProperties" in node:
            node["patternProperties"] = {
                to_grammar_regex(pattern): schema for pattern, schema in node["patternProperties"].items()
            }
        if not merges and node.get("properties") and not any(rule in node for rule in _OBJECT_RULES):
            for name in node.get("required") or ():
                node["properties"].setdefault(name, {})
            node["additionalProperties"] = False
    return relaxed


def schema_words(schema: dict[str, Any]) -> list[str]:
    """Texts for strings of ``schema`` that patterns and formats hold to a form, as they stand between quotes."""
    found: list[str] = []
    for node in References(schema).applied():
        if node.get("format") in _FORMAT_WORDS:
            found += _FORMAT_WORDS[node["format"]]
        if "pattern" in node:
            found += regex_words(node["pattern"], node.get("minLength", 0), node.get("maxLength"))
        for pattern in node.get("patternProperties", ()):
            found += regex_words(pattern)
    return [json.dumps(word, ensure_ascii=False)[1:-1] for word in found]


def _merges(node: dict[str, Any]) -> bool:
    if len(node.get("allOf") or ()) > 1:
        return True
    return any(name in node for name in ("properties", "required")) and any(
        name in node for name in _COMBINERS
    )
