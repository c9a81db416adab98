"""What of a JSON schema a grammar can hold an output to: the rest is taken out and named.

A relaxed schema admits whatever the schema admits, and where nothing had to be named, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.constrain.disjoint import all_disjoint
from paged_backend.constrain.references import LISTS, MAPS, SINGLE, References
from paged_backend.constrain.regex import RegexError, to_grammar_regex

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The formats that the compiler can hold an output to."""
# those of JSON Schema's own that it cannot; any other name is an annotation, as JSON Schema has it
_OTHER_FORMATS = frozenset(
    {
        "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
        "relative-json-pointer", "regex",
    }
)  # fmt: skip
_EVALUATING = (
    "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "then", "else", "dependentSchemas", "not",
)  # fmt: skip
_LENGTHS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANY_VALUE = ("const", "default", "example", "examples")
_LEFT_OUT = "has no form in a grammar"


@dataclass(frozen=True, slots=True)
class Unenforced:
    """One keyword that was taken out. place: a pointer to its schema. invalid: it is not valid JSON Schema at all."""

    keyword: str
    place: str
    reason: str
    invalid: bool = False

    def __str__(self) -> str:
        return f"{self.keyword!r} at {self.place} {self.reason}"


def relax(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unenforced]]:
    """A copy of ``schema`` without what cannot be enforced, and what that was. References all start at its root."""
    relaxed: dict[str, Any] = copied(schema)
    references = References(relaxed)
    lost: dict[int, list[Unenforced]] = {id(node): _drop_invalid(node, at) for node, at in references.places}
    for node, place, keyword in references.unresolved:
        if node.pop(keyword) is not None:
            lost[id(node)].append(Unenforced(keyword, place, "leads to no schema of the document"))
    found: list[Unenforced] = []
    stack = [(relaxed, "#")]
    seen: set[int] = set()
    while stack:  # what a rule took out, and definitions that nobody refers to, lose nothing
        node, place = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            found += lost.get(id(node), [])
            found += _apply_rules(node, place, references)
            stack += references.below(node, place)[::-1]
    return relaxed, found


def _apply_rules(node: dict[str, Any], place: str, references: References) -> list[Unenforced]:
    lost = []
    if "$ref" in node and references.is_circle(node):
        del node["$ref"]
        lost.append(Unenforced("$ref", place, "leads in a circle"))
    for keyword, rule in _RULES.items():
        reason = rule(node, references) if keyword in node else None
        if reason is not None:
            lost.append(Unenforced(keyword, place, reason))
    return lost


def copied(value: Any) -> Any:
    """JSON data that shares nothing with ``value``."""
    if isinstance(value, Mapping):
        return {str(key): copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


# --- keywords whose value is none that JSON Schema knows ------------------------------------------------------------


def _drop_invalid(node: dict[str, Any], place: str) -> list[Unenforced]:
    lost = []
    for keyword, value in list(node.items()):
        if keyword in _ANY_VALUE:
            continue
        if keyword in _LENGTHS and isinstance(value, float) and value.is_integer():
            node[keyword] = value = int(value)
        if value is None and keyword != "type":  # as serializers write a field that is not set
            del node[keyword]
        elif keyword in _VALID and not _VALID[keyword](value):
            del node[keyword]
            lost.append(Unenforced(keyword, place, f"cannot be {value!r:.60}", invalid=True))
    return lost


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_VALID: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "required": _is_names,
    "pattern": lambda value: isinstance(value, str),
    "format": lambda value: isinstance(value, str),
    "uniqueItems": lambda value: isinstance(value, bool),
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
    "items": lambda value: _is_schema(value) or (isinstance(value, list) and all(map(_is_schema, value))),
    **dict.fromkeys(MAPS, lambda value: isinstance(value, dict) and all(map(_is_schema, value.values()))),
    **dict.fromkeys(
        LISTS, lambda value: isinstance(value, list) and bool(value) and all(map(_is_schema, value))
    ),
    **dict.fromkeys((name for name in SINGLE if name != "items"), _is_schema),
    **dict.fromkeys(_LENGTHS, lambda value: type(value) is int and value >= 0),
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda v: isinstance(v, bool) or _is_number(v)),
}


# --- keywords without a form in a grammar: a rule changes the schema, and says why where that loses something --------


def _taken_out(keyword: str, *without_effect: Any) -> Callable[[dict[str, Any], References], str | None]:
    def rule(node: dict[str, Any], _: References) -> str | None:
        value = node.pop(keyword)
        return None if any(value is none or value == none for none in without_effect) else _LEFT_OUT

    return rule


def _without_effect(keyword: str) -> Callable[[dict[str, Any], References], str | None]:
    def rule(node: dict[str, Any], _: References) -> None:
        del node[keyword]

    return rule


def _unique(node: dict[str, Any], _: References) -> str | None:
    unique = node.pop("uniqueItems")
    return _LEFT_OUT if unique and node.get("maxItems", 2) > 1 else None


def _condition(node: dict[str, Any], _: References) -> str | None:
    branches = [node.pop(name, True) for name in ("then", "else")]
    del node["if"]
    return None if branches == [True, True] else _LEFT_OUT


def _contains(node: dict[str, Any], _: References) -> str | None:
    del node["contains"]
    least, most = node.pop("minContains", 1), node.pop("maxContains", None)
    return None if least == 0 and most is None else _LEFT_OUT


def _property_names(node: dict[str, Any], references: References) -> str | None:
    wanted = node.pop("propertyNames")
    names = references.resolve(wanted)
    if names is True or (isinstance(names, dict) and _binding(names) <= {"type"} and _admits_text(names)):
        return None
    if any(name in node for name in ("properties", "patternProperties", *_EVALUATING)) or names is False:
        return _LEFT_OUT
    others = node.get("additionalProperties", True)
    if _binding(names) - {"type"} == {"pattern"} and isinstance(names["pattern"], str):
        node["patternProperties"] = {names["pattern"]: others}
        _patterns(node, references)
    elif _binding(names) - {"type"} == {"enum"}:
        node["properties"] = {name: others for name in names["enum"] if isinstance(name, str)}
    else:
        return _LEFT_OUT
    node["additionalProperties"] = False
    return None


def _binding(schema: dict[str, Any]) -> set[str]:
    """The keywords that say something of a value."""
    return schema.keys() & (_VALID.keys() | _RULES.keys() | {"const", "$ref"}) - {"$defs", "definitions"}


def _admits_text(schema: dict[str, Any]) -> bool:
    return schema.get("type", "string") == "string" or "string" in schema["type"]


def _dependent_required(node: dict[str, Any], _: References) -> str | None:
    always = set(node.get("required") or ())
    return (
        None
        if all(always.issuperset(names) for names in node.pop("dependentRequired").values())
        else _LEFT_OUT
    )


def _unevaluated(keyword: str, plain: str) -> Callable[[dict[str, Any], References], str | None]:
    def rule(node: dict[str, Any], _: References) -> str | None:
        wanted = node.pop(keyword)
        if wanted is True or wanted == {} or plain in node:
            return None
        if any(name in node for name in _EVALUATING):
            return "beside schemas that are combined has no form in a grammar"
        node[plain] = wanted
        return None

    return rule


def _pattern(node: dict[str, Any], _: References) -> str | None:
    try:
        to_grammar_regex(node["pattern"])
    except RegexError as error:
        del node["pattern"]
        return f"has {error.construct}"
    return None


def _patterns(node: dict[str, Any], _: References) -> str | None:
    problems = []
    for pattern in list(node["patternProperties"]):
        try:
            to_grammar_regex(pattern)
        except RegexError as error:
            del node["patternProperties"][pattern]
            problems.append(error.construct)
    if not problems:
        return None
    node.pop("additionalProperties", None)  # it would speak of those that the pattern spoke of
    node.pop("unevaluatedProperties", None)
    return f"has {problems[0]}"


def _format(node: dict[str, Any], _: References) -> str | None:
    kind = node["format"]
    if kind in FORMATS:
        return None
    del node["format"]
    return f"{kind!r} has no form in a grammar" if kind in _OTHER_FORMATS else None


def _one_of(node: dict[str, Any], references: References) -> str | None:
    branches = node.pop("oneOf")
    certain = all_disjoint(branches, references)
    if "anyOf" in node:
        node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
    else:
        node["anyOf"] = branches
    return None if certain else "has alternatives that may hold together, which is not ruled out"


def _min_properties(node: dict[str, Any], _: References) -> str | None:
    least = node["minProperties"]
    required = set(node.get("required") or ())
    if not set(node.get("properties") or ()) <= required:
        del node["minProperties"]
        return None if len(required) >= least else "beside optional properties has no form in a grammar"
    return None


def _max_properties(node: dict[str, Any], _: References) -> str | None:
    named = set(node.get("properties") or ())
    if named <= set(node.get("required") or ()):
        return None
    most = node.pop("maxProperties")
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return None if closed and len(named) <= most else "beside optional properties has no form in a grammar"


_RULES: dict[str, Callable[[dict[str, Any], References], str | None]] = {
    "uniqueItems": _unique,
    "not": _taken_out("not", False),
    "if": _condition,
    "then": _without_effect("then"),  # what "if" left: there was none
    "else": _without_effect("else"),
    "contains": _contains,
    "minContains": _without_effect("minContains"),
    "maxContains": _without_effect("maxContains"),
    "dependentRequired": _dependent_required,
    "dependentSchemas": _taken_out("dependentSchemas", {}),
    "dependencies": _taken_out("dependencies", {}),
    "pattern": _pattern,
    "patternProperties": _patterns,
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "format": _format,
    "oneOf": _one_of,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
}
