"""Token ids as callers have them: lists, tuples, arrays and tensors, which all become lists of ints here."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from paged_backend.errors import RequestRejectedError


def plain(value: Any) -> Any:
    """An array or tensor as (nested) lists or a number; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value: Any) -> bool:
    """Whether it stands where a token id may stand, right or not."""
    return isinstance(value, (int, float, complex)) or hasattr(value, "__index__")


def as_token_ids(value: Any, name: str) -> list[int]:
    """One flat sequence of ids. ``RequestRejectedError``, which begins with ``name``, for anything else."""
    value = plain(value)
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Iterable):
        raise RequestRejectedError(f"{name} must be a list of token ids, got {value!r:.80}")
    ids = []
    for place, item in enumerate(value):
        if type(item) is int:
            ids.append(item)
            continue
        item = plain(item)
        if isinstance(item, (list, tuple)):
            raise RequestRejectedError(
                f"{name} must be one flat list of token ids, got a list of lists: give each row by itself"
            )
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise RequestRejectedError(
                f"{name} must be integers, got {item!r:.80} of type {type(item).__name__} at position {place}"
            )
        ids.append(operator.index(item))
    return ids
