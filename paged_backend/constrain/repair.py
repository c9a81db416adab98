"""Schemas that the grammar compiler refuses although every keyword is known to it: which part it is, and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.constrain.references import References, moved
from paged_backend.constrain.relax import TYPES, Unenforced

# what to try without, the rarest reason for a schema first; the second goes with the first
_SUSPECTS = (
    ("patternProperties", "additionalProperties"), ("minProperties",), ("maxProperties",), ("multipleOf",), ("format",),
    ("pattern",), ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"), ("minLength",), ("maxLength",),
    ("minItems",), ("maxItems",), ("allOf",), ("anyOf",), ("$ref",), ("enum",), ("const",), ("required",),
    ("additionalProperties",), ("items",), ("prefixItems",), ("properties", "additionalProperties"),
)  # fmt: skip


def repair_schema(
    schema: dict[str, Any], problem_of: Callable[[dict[str, Any]], str | None]
) -> list[Unenforced]:
    """Take out of ``schema`` what ``problem_of`` names a problem for, until there is none; what was taken out."""
    lost: list[Unenforced] = []
    while (problem := problem_of(schema)) is not None:
        node, place = _smallest(schema, problem_of)
        problem = problem_of(_alone(schema, place)) or problem
        keyword = _without(schema, node, place, problem_of)
        lost.append(
            Unenforced(keyword, place, f"cannot be compiled ({problem:.160})", "Unsatisfiable" in problem)
        )
    return lost


def _smallest(
    root: dict[str, Any], problem_of: Callable[[dict[str, Any]], str | None]
) -> tuple[dict[str, Any], str]:
    """The deepest schema with a problem of its own, none of whose parts has one."""
    references = References(root)
    node, place = root, "#"
    seen = {id(root)}
    while True:
        for child, where in references.below(node, place):
            if child and id(child) not in seen and problem_of(_alone(root, where)) is not None:
                node, place = child, where
                seen.add(id(child))
                break
        else:
            return node, place


def _alone(root: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema at ``place``, in a document of its own with everything that it may refer to."""
    if place == "#":
        return root
    return {"$ref": f"#/$defs/root{place[1:]}", "$defs": {"root": moved(root, "#/$defs/root")}}


def _without(
    root: dict[str, Any], node: dict[str, Any], place: str, problem_of: Callable[[dict[str, Any]], str | None]
) -> str:
    for names in _SUSPECTS:
        if names[0] in node:
            kept = dict(node)
            for name in names:
                node.pop(name, None)
            if problem_of(_alone(root, place)) is None:
                return names[0]
            node.clear()
            node.update(kept)
    kind = node.get("type")
    definitions: dict[str, Any] = {name: node[name] for name in ("$defs", "definitions") if name in node}
    node.clear()
    node.update(definitions)
    if isinstance(kind, str) and kind in TYPES:
        node["type"] = kind
        return "all but type" if problem_of(_alone(root, place)) is None else "everything"
    return "everything"
