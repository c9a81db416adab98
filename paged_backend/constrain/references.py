"""Where references of a JSON schema lead, and every place where a schema stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else",
)  # fmt: skip
_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$vocabulary")


def children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(pointer from ``node``, schema) of the schemas in it; not those in enum, const, default or examples."""
    for name in MAPS:
        if isinstance(node.get(name), dict):
            for key, child in node[name].items():
                yield f"/{name}/{escaped(key)}", child
    for name in (*LISTS, *SINGLE):
        child = node.get(name)
        if isinstance(child, list):
            for number, item in enumerate(child):
                yield f"/{name}/{number}", item
        elif child is not None and name not in LISTS:
            yield f"/{name}", child


def escaped(key: str) -> str:
    """A key as one step of a JSON pointer in a URI."""
    return quote(key.replace("~", "~0").replace("/", "~1"), safe="~!$&'()*+,;=:@")


def moved(schema: Any, root: str) -> Any:
    """A copy of a schema that is to stand at ``root`` (``#/$defs/x``): references from the old root start there."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else moved(value, root)
            for key, value in schema.items()
        }
    return [moved(item, root) for item in schema] if isinstance(schema, list) else schema


class References:
    """The schemas of one document by their places.

    ``places``: (schema, pointer such as ``#/properties/a``) of each object that is a schema, those included that only
    a reference names. Building it rewrites every reference that leads somewhere in the document into ``$ref`` with a
    pointer from the root, and takes out the names that were needed for that; ``unresolved`` are those that lead
    nowhere, as (schema, pointer, keyword), left as they are.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.places: list[tuple[dict[str, Any], str]] = []
        self.unresolved: list[tuple[dict[str, Any], str, str]] = []
        self._bases: dict[int, str] = {}
        self._named: dict[str, tuple[Any, str]] = {"": (root, "#")}
        self._index(root, "#", "")
        for (
            node,
            place,
        ) in self.places:  # grows where a reference leads to a place that is not known as a schema
            self._rewrite(node, place)
        for node, _ in self.places:
            for name in _NAMES:
                if isinstance(node.get(name), str | bool):
                    del node[name]
        self._by_place = {place: node for node, place in self.places}

    def resolve(self, node: Any) -> Any:
        """The schema behind a chain of references; ``node`` itself where it has none, or they go in a circle."""
        seen: set[str] = set()
        while isinstance(node, dict) and isinstance(node.get("$ref"), str) and node["$ref"] not in seen:
            seen.add(node["$ref"])
            node = self._by_place.get(node["$ref"], True)
        return node

    def below(self, node: dict[str, Any], place: str) -> list[tuple[dict[str, Any], str]]:
        """The schemas that a schema applies, with their places; definitions only where its ``$ref`` names one."""
        found = [
            (child, place + step)
            for step, child in children(node)
            if isinstance(child, dict) and not step.startswith(("/$defs/", "/definitions/"))
        ]
        target = node.get("$ref")
        return [*found, (self._by_place[target], target)] if target in self._by_place else found

    def applied(self) -> list[dict[str, Any]]:
        """The schemas that bear on a value of the root's, each once: no definitions that nobody refers to."""
        found: dict[int, dict[str, Any]] = {}
        stack = [(self.root, "#")]
        while stack:
            node, place = stack.pop()
            if id(node) not in found:
                found[id(node)] = node
                stack += self.below(node, place)
        return list(found.values())

    def is_circle(self, node: dict[str, Any]) -> bool:
        """Whether a schema means itself by way of ``$ref`` and ``allOf`` alone, so that it says nothing."""
        stack, seen = [node], set[int]()
        while stack:
            here = stack.pop()
            for child in (self._by_place.get(here.get("$ref", "")), *(here.get("allOf") or ())):
                if child is node:
                    return True
                if isinstance(child, dict) and id(child) not in seen:
                    seen.add(id(child))
                    stack.append(child)
        return False

    def _index(self, root: Any, place: str, base: str) -> None:
        stack = [(root, place, base)]
        while stack:
            node, place, base = stack.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            name = node.get("$id", node.get("id"))
            if isinstance(name, str):
                base = name if name.startswith("urn:") else urljoin(base, name)
                self._named.setdefault(base.rstrip("#"), (node, place))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(keyword), str):
                    self._named.setdefault(f"{base.partition('#')[0]}#{node[keyword]}", (node, place))
            self._bases[id(node)] = base.partition("#")[0]
            self.places.append((node, place))
            stack += [(child, place + step, base) for step, child in children(node)][::-1]

    def _rewrite(self, node: dict[str, Any], place: str) -> None:
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = node.get(keyword)
            if reference is None:
                continue
            found = self._find(reference, self._bases[id(node)]) if isinstance(reference, str) else None
            if found is None or (keyword != "$ref" and "$ref" in node):
                self.unresolved.append((node, place, keyword))
                continue
            target, where = found
            self._index(target, where, self._bases[id(node)])
            del node[keyword]
            if target is not True:
                node["$ref"] = where

    def _find(self, reference: str, base: str) -> tuple[Any, str] | None:
        address = base + reference if reference.startswith("#") else urljoin(base, reference)
        if address in self._named:
            return self._named[address]
        document, _, fragment = address.partition("#")
        if document not in self._named or (fragment and not fragment.startswith("/")):
            return None
        node, place = self._named[document]
        for step in fragment.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                return None
            place += f"/{escaped(key)}"
        return (node, place) if isinstance(node, dict | bool) else None
