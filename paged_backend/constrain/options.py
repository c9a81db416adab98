"""StructuredOutputs: the form a request's output must have. Field names are those of vLLM's class for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """A rule of ``StructuredOutputs.grammar`` that is JSON of a schema, and what to call it in messages.

    schema: a JSON schema, as a dict or as JSON text. strict: as in :class:`StructuredOutputs`. foreign: the caller did
    not write the schema (a tool's), so what is no valid JSON Schema in it is left out, too, unless ``strict``.
    """

    rule: str
    schema: Mapping[str, Any] | str
    label: str
    strict: bool = False
    foreign: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or not re.fullmatch("[a-z][a-z0-9_]*", self.rule):
            raise ValueError(
                f"structured_outputs.schemas: {self.rule!r} is no name of a rule, such as args_0"
            )
        object.__setattr__(self, "schema", _schema_text(self.schema, self.label))


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Exactly one of these, checked at construction (``ValueError``); the grammar itself is compiled at submit.

    json: a JSON schema, as a dict or as JSON text. json_object: True for any JSON object. regex: the whole output
    matches it, with Python's syntax; ``\\d``, ``\\w`` and ``\\s`` are ASCII unless it begins with ``(?u)``. choice: the
    output is one of these strings. grammar: Lark, or GBNF as llama.cpp writes it.

    JSON comes on one line and as raw UTF-8, spaced as ``json.dumps`` spaces it, because that is how models write it:
    held to other spacing they answer worse. ``item_separator`` and ``key_separator`` change that. An object schema that
    lists its properties and says nothing of others admits no others.

    strict: a schema with keywords that no grammar can hold an output to (``uniqueItems``, ``not``, ``if`` ...) is
    refused; with False it is relaxed, and a line of the log names what was left out. schemas: rules that ``grammar``
    refers to by name, each JSON of a schema.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    item_separator: str = ", "
    key_separator: str = ": "
    strict: bool = True
    schemas: Sequence[SchemaRule] = ()

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got {', '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json, "structured_outputs.json"))
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(
                "structured_outputs.json_object must be True; leave structured_outputs out for free text"
            )
        if self.choice is not None:
            choices = [self.choice] if isinstance(self.choice, str) else list(self.choice)
            if not choices or not all(isinstance(c, str) and c for c in choices):
                raise ValueError(f"structured_outputs.choice must be non-empty strings, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(choices))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name} must be a non-empty string, got {value!r}")
        if not isinstance(self.strict, bool):
            raise ValueError(f"structured_outputs.strict must be True or False, got {self.strict!r}")
        if self.schemas and self.grammar is None:
            raise ValueError("structured_outputs.schemas needs the grammar that refers to them")
        try:
            rules = [rule if isinstance(rule, SchemaRule) else SchemaRule(**rule) for rule in self.schemas]
        except TypeError as error:
            raise ValueError(f"structured_outputs.schemas: {error}") from None
        object.__setattr__(self, "schemas", tuple(rules))
        for name, mark in (("item_separator", ","), ("key_separator", ":")):
            value = getattr(self, name)
            if not isinstance(value, str) or value.strip(" ") != mark:
                raise ValueError(
                    f"structured_outputs.{name} must be {mark!r} with or without spaces, got {value!r}"
                )

    @classmethod
    def coerce(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """``value`` itself, or one built from a mapping with the same names."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"structured_outputs must be StructuredOutputs or a dict, got {type(value).__name__}"
            )
        known = {field.name for field in fields(cls)}
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(f"structured_outputs has no {unknown[0]!r}; it has {', '.join(_KINDS)}")
        return cls(**value)


def _schema_text(schema: Any, label: str) -> str:
    """Canonical JSON text of a schema, so that equal schemas are one key in the cache of compiled grammars."""
    try:
        data = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise ValueError(f"{label} is not valid JSON: {error}") from None
    if data is True:
        data = {}
    if not isinstance(data, Mapping):
        raise ValueError(f"{label} must be a JSON schema (an object), got {type(data).__name__}")
    try:
        return json.dumps(data, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label} must hold only JSON data: {error}") from None
