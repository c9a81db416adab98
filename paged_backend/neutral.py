"""Options that other engines and servers have and no answer depends on here: which of their values are taken, and why
no others.

A caller who asks for what is done anyway must not be sent away for it; one who asks for something else is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Neutral:
    """takes: whether a value asks for nothing but what is done anyway. why: what follows the option's name if not."""

    why: str
    takes: Callable[[Any], bool]


def label(kind: type, what: str) -> Neutral:
    """An option that says something about a request, or how to go about it, and nothing about its result."""
    return Neutral(f"must be {what}", lambda value: isinstance(value, kind))


def only(*values: Any, why: str) -> Neutral:
    """An option that means what is done anyway if it has one of ``values``; True is not taken for 1."""
    return Neutral(
        why,
        lambda value: any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
        ),
    )


def never(why: str) -> Neutral:
    """An option that always asks for what is not there; empty lists and objects ask for nothing."""
    return Neutral(why, lambda value: value is False or (isinstance(value, (list, dict, str)) and not value))


TEXT = label(str, "text")
FLAG = label(bool, "true or false")
OBJECT = label(dict, "an object")


def refusal(name: str, value: Any, table: Mapping[str, Neutral]) -> str | None:
    """What is wrong with the option ``name``, None if its value is harmless. None is "not given" and always is."""
    rule = table[name]
    return None if value is None or rule.takes(value) else f"{name} {rule.why}"


def without_neutral(given: Mapping[str, Any], table: Mapping[str, Neutral]) -> dict[str, Any]:
    """``given`` without the options of ``table``. Raises ValueError for the first that asks for something else."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name not in table:
            kept[name] = value
        elif (problem := refusal(name, value, table)) is not None:
            raise ValueError(f"{problem} (got {value!r:.80})")
    return kept
