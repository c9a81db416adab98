"""The shortest way to end: a token path from a grammar's state to one where the output is complete.

The engine keeps such a path for each constrained request, and lets a sampled token pass only if a path that fits the
remaining budget exists behind it. So an output is complete when max_tokens is reached, whatever the model would like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_NEVER = np.int32(1 << 20)
_FREE_TEXT = (100, 0.02)  # tokens, and share of the vocabulary, beyond which a state is the inside of a text
_ROUNDS = 48  # levels of the broad search
_WIDTH = 64  # states that the broad search goes on with from level to level
_BRANCHES = 48  # tokens that it tries from each
_CLOSE, _EMPTY, _QUOTE, _PUNCTUATION, _VALUE, _TEXT, _OPEN = 0, 100, 200, 400, 500, 600, 900


class ClosingOrder:
    """Which token to try first on the way to an end, by its spelling; lower is earlier.

    Inside a text, brackets are text and only a quote leads on. Outside there are two orders: in one, commas and colons
    come before words, in the other after them (words with a minimum length before the next comma).
    """

    def __init__(self, spellings: Sequence[bytes], special_ids: Sequence[int]) -> None:
        ranks = np.array([_rank(spelling) for spelling in spellings], np.int32)
        lengths = np.array([len(spelling) for spelling in spellings], np.int32)
        never = lengths == 0
        never[[i for i in special_ids if i < len(never)]] = True
        words = (ranks >= _TEXT) & (ranks < _OPEN) & (lengths >= 3)
        late = np.where(words, _PUNCTUATION - 64 + (ranks - _TEXT), ranks)
        quotes = (ranks >= _QUOTE) & (ranks < _PUNCTUATION)
        inside = np.where(quotes, ranks, _TEXT + 64 - np.minimum(lengths, 64))
        self.first_bytes = np.array([spelling[0] if spelling else 0 for spelling in spellings], np.uint8)
        self.outside = tuple(np.where(never, _NEVER, order).astype(np.int32) for order in (ranks, late))
        self.inside = np.where(never, _NEVER, inside).astype(np.int32)
        self.size = len(spellings)
        self.free_text = max(_FREE_TEXT[0], _FREE_TEXT[1] * self.size)


def _rank(spelling: bytes) -> int:
    size = min(len(spelling), 64)
    if not spelling.strip(b"}]"):
        return _CLOSE + 64 - size
    if spelling == b'""':
        return _EMPTY
    if spelling[:1] == b'"' and not spelling.strip(b'"}]'):
        return _QUOTE + 64 - size
    if not spelling.strip(b',:" ') and b'"' not in spelling[1:-1]:
        return _PUNCTUATION + 64 - size
    if spelling in (b"null", b"true", b"false", b"{}", b"[]") or (size == 1 and spelling.isdigit()):
        return _VALUE
    if spelling[:1] in (b"{", b"["):
        return _OPEN + size
    if not spelling.strip():
        return _OPEN + 64 + size
    return _TEXT + 64 - size


def find_closing(
    matcher: Any, order: ClosingOrder, eos: int, limit: int, *, broad: bool = True
) -> list[int] | None:
    """Tokens that lead ``matcher`` (left as it is) to an accepting state, at most ``limit``; None if none were found.

    The path is short, not proven to be the shortest: two greedy walks, then, unless ``broad`` is False, a beam search.
    """
    if matcher.is_accepting():
        return []
    best: list[int] | None = None
    for outside in order.outside:
        path = _walk(matcher, order, outside, limit if best is None else len(best) - 1)
        best = path if path is not None else best
    if best is None and broad and limit > 0:
        best = _beam(matcher, order, eos, limit, 1) or _beam(matcher, order, eos, limit, 24)
    return best


def allowed_tokens(matcher: Any, size: int) -> Array:
    """Bool [size]: the tokens that the grammar allows next."""
    return _unpack(matcher.compute_bitmask(), size)


def _unpack(bits: bytes, size: int) -> Array:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little").view(bool)


def _walk(matcher: Any, order: ClosingOrder, outside: Array, limit: int) -> list[int] | None:
    state = matcher.deep_copy()
    path: list[int] = []
    while len(path) < limit:
        forced = state.compute_ff_tokens()
        if not forced:
            allowed = allowed_tokens(state, order.size)
            free = np.count_nonzero(allowed) > order.free_text
            token = int(np.where(allowed, order.inside if free else outside, _NEVER).argmin())
            if not allowed[token]:
                return None
            forced = [token]
        if not state.consume_tokens(forced):
            return None
        path.extend(forced)
        if state.is_accepting():
            return path if len(path) <= limit else None
    return None


def _beam(matcher: Any, order: ClosingOrder, eos: int, limit: int, repeats: int) -> list[int] | None:
    """Breadth first over a few tokens of each state, expanding at most ``repeats`` states that allow the same tokens:
    with 1, different places that look alike are missed; with many, a long way through one place is."""
    states: list[tuple[Any, list[int]]] = [(matcher, [])]
    seen: Counter[int] = Counter()
    for _ in range(min(limit, _ROUNDS)):
        reached: list[tuple[Any, list[int]]] = []
        for state, path in states:
            bits = state.compute_bitmask()
            seen[hash(bits)] += 1
            if seen[hash(bits)] > repeats:
                continue
            for token in _varied(_unpack(bits, order.size), order):
                if state.validate_tokens([token, eos]) == 2:
                    return [*path, token]
                child = state.deep_copy()
                if child.consume_token(token):
                    reached.append((child, [*path, token]))
        # evenly spread over what was reached, so that no branch of an alternative is lost altogether
        states = reached[:: max(1, -(-len(reached) // _WIDTH))]
        if not states:
            break
    return None


def _varied(allowed: Array, order: ClosingOrder) -> list[int]:
    """Allowed tokens that differ in their first byte; signs and digits come before letters."""
    ranks = order.outside[0]
    ids = np.flatnonzero(allowed & (ranks < _NEVER))
    ids = ids[np.argsort(ranks[ids], kind="stable")]
    firsts, where = np.unique(order.first_bytes[ids], return_index=True)
    letters = np.array([chr(byte).isalpha() for byte in firsts], bool)
    picked = ids[where[np.argsort(letters, kind="stable")]]
    return [int(token) for token in picked[:_BRANCHES]]
