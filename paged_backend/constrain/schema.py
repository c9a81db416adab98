"""JSON schemas made ready for the grammar compiler: closed objects, formats that are mere annotations left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# the formats that the compiler can hold an output to; JSON Schema lets any other be an annotation
FORMATS = frozenset(
    {
        "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
    }
)  # fmt: skip
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
_OBJECT_RULES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COMBINERS = ("allOf", "anyOf", "oneOf", "$ref")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames", "not", "contains")


def prepare_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``schema`` whose outputs are all valid for ``schema``.

    Objects that list properties and say nothing of others become closed: JSON Schema would admit any further key, and
    a model that invents keys helps nobody. Left as they are where several schemas speak of one object (``allOf``, or
    properties beside ``anyOf``, ``oneOf`` or ``$ref``), because closing one of them would forbid the others' keys.
    """
    prepared: dict[str, Any] = _copy(schema)
    nodes = list(_nodes(prepared))
    merges = any(_merges(node) for node in nodes)
    for node in nodes:
        kind = node.get("format")
        if isinstance(kind, str) and kind not in FORMATS:
            del node["format"]
        elif isinstance(kind, str) and kind in _PATTERNS and "pattern" not in node:
            node["pattern"] = _PATTERNS[node.pop("format")]
        if not merges and node.get("properties") and not any(rule in node for rule in _OBJECT_RULES):
            node["additionalProperties"] = False
    return prepared


def _merges(node: dict[str, Any]) -> bool:
    if len(node.get("allOf") or ()) > 1:
        return True
    return any(name in node for name in ("properties", "required")) and any(
        name in node for name in _COMBINERS
    )


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every place of ``schema`` where a schema stands (not those in enum, const, default or examples)."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name in _MAPS:
            if isinstance(node.get(name), dict):
                stack.extend(node[name].values())
        for name in _LISTS:
            if isinstance(node.get(name), list):
                stack.extend(node[name])
        for name in _SINGLE:
            if isinstance(node.get(name), dict):
                stack.append(node[name])
            elif isinstance(node.get(name), list):
                stack.extend(node[name])


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
