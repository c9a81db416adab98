"""Whether two JSON schemas can both hold for one value: ``oneOf`` over schemas that cannot is ``anyOf``."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from paged_backend.constrain.references import References

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_DEPTH = 8


def all_disjoint(branches: list[Any], references: References) -> bool:
    """True only where it is certain that no value is valid for two of ``branches``."""
    return all(disjoint(a, b, references) for a, b in combinations(branches, 2))


def disjoint(a: Any, b: Any, references: References, depth: int = _DEPTH) -> bool:
    """True only where it is certain that no value is valid for both."""
    if a is False or b is False:
        return True
    if depth == 0 or not isinstance(a, dict) or not isinstance(b, dict):
        return False
    for one, other in ((a, b), (b, a)):
        target = references.resolve(one)
        if target is not one and disjoint(target, other, references, depth - 1):
            return True
        if any(disjoint(part, other, references, depth - 1) for part in one.get("allOf") or ()):
            return True
        for name in ("anyOf", "oneOf"):
            parts = one.get(name)
            if parts and all(disjoint(part, other, references, depth - 1) for part in parts):
                return True
    values = _values(a), _values(b)
    if values[0] is not None and values[1] is not None:
        return not set(values[0]) & set(values[1])
    types = _types(a) & _types(b)
    if not types:
        return True
    return all(
        (name == "object" and _objects(a, b, references, depth))
        or (name == "number" and _numbers(a, b))
        for name in types
    )  # fmt: skip


def _values(schema: dict[str, Any]) -> list[str] | None:
    """What ``const`` or ``enum`` admit, as JSON text; numbers that are equal are one."""
    if "const" in schema:
        listed = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        listed = schema["enum"]
    else:
        return None
    return [json.dumps(_plain(value), sort_keys=True) for value in listed]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _types(schema: dict[str, Any]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset(_type_of(json.loads(value)) for value in values)
    named = schema.get("type")
    if named is None:
        return _TYPES
    names = [named] if isinstance(named, str) else list(named)
    return frozenset("number" if name == "integer" else name for name in names)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _objects(a: dict[str, Any], b: dict[str, Any], references: References, depth: int) -> bool:
    for one, other in ((a, b), (b, a)):
        theirs = other.get("properties") or {}
        closed = other.get("additionalProperties") is False and not other.get("patternProperties")
        for name in one.get("required") or ():
            if closed and name not in theirs:
                return True
            mine = (one.get("properties") or {}).get(name, True)
            if name in theirs and disjoint(mine, theirs[name], references, depth - 1):
                return True
    return False


def _numbers(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def bounds(schema: dict[str, Any]) -> tuple[float, float]:
        low, high = schema.get("minimum"), schema.get("maximum")
        return (-float("inf") if low is None else low, float("inf") if high is None else high)

    return bounds(a)[1] < bounds(b)[0] or bounds(b)[1] < bounds(a)[0]
