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
        if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
            del node["format"]
        if not merges and node.get("properties") and not any(rule in node for rule in _OBJECT_RULES):
            node["additionalProperties"] = False
    return prepared


def _merges(node: dict[str, Any]) -> bool:
    if len(node.get("allOf") or ()) > 1:
        return True
    return any(name in node for name in ("properties", "required")) and any(name in node for name in _COMBINERS)


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
