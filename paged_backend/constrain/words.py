"""Short texts that a regex matches, by its structure: where a search for the end of an output can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

_LONGEST = 400  # beyond that no word of a wanted length is made
_MANY = 24  # words of one regex


@dataclass(slots=True)
class Piece:
    """node: a character, an empty text (an anchor) or alternatives in a group; it stands least to most times."""

    node: str | list[list[Piece]]
    least: int = 1
    most: int | None = 1


Alternatives = list[list[Piece]]


def words(regex: Alternatives, at_least: int = 0, at_most: int | None = None) -> list[str]:
    """The shortest word, of ``at_least`` characters, and for each way through the alternatives a short one."""
    short = _shortest(regex)
    found = [short]
    if len(short) < at_least <= _LONGEST:
        lengths = _by_length(regex, min(at_least + 64, at_most or _LONGEST))
        found = [lengths[n] for n in sorted(lengths) if n >= at_least][:1]
    elif not at_least:
        found += islice(_variants(regex), _MANY)
    return list(dict.fromkeys(word for word in found if at_most is None or len(word) <= at_most))


def _shortest(regex: Alternatives) -> str:
    return min(("".join(map(_least, sequence)) for sequence in regex), key=len)


def _least(piece: Piece) -> str:
    if not piece.least:
        return ""
    return (piece.node if isinstance(piece.node, str) else _shortest(piece.node)) * piece.least


def _variants(regex: Alternatives) -> Iterator[str]:
    for sequence in regex:
        least = [_least(piece) for piece in sequence]
        yield "".join(least)
        for number, piece in enumerate(sequence):
            if isinstance(piece.node, str):
                if not piece.least and piece.node:
                    yield "".join([*least[:number], piece.node, *least[number + 1 :]])
                continue
            rest = _shortest(piece.node) * max(piece.least - 1, 0)
            for variant in _variants(piece.node):
                yield "".join([*least[:number], variant, rest, *least[number + 1 :]])


def _by_length(regex: Alternatives, limit: int) -> dict[int, str]:
    """A word for each length up to ``limit`` that has one."""
    found: dict[int, str] = {}
    for sequence in regex:
        ways = {0: ""}
        for piece in sequence:
            ways = _joined(ways, _repeated(piece, limit), limit)
        for length, word in ways.items():
            found.setdefault(length, word)
    return found


def _repeated(piece: Piece, limit: int) -> dict[int, str]:
    once = {len(piece.node): piece.node} if isinstance(piece.node, str) else _by_length(piece.node, limit)
    ways = {0: ""}
    for _ in range(min(piece.least, limit + 1)):
        ways = _joined(ways, once, limit)
    found = dict(ways)
    for _ in range(limit if piece.most is None else min(piece.most - piece.least, limit)):
        ways = {n: word for n, word in _joined(ways, once, limit).items() if n not in found}
        if not ways:
            break
        found.update(ways)
    return found


def _joined(first: dict[int, str], second: dict[int, str], limit: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for a, before in first.items():
        for b, behind in second.items():
            if a + b <= limit:
                found.setdefault(a + b, before + behind)
    return found
