"""The shortest way to end: a token path from a grammar's state to one where the output is complete.

The engine keeps such a path for each constrained request, and lets a sampled token pass only if a path that fits the
remaining budget exists behind it. So an output is complete when max_tokens is reached, whatever the model would like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_NEVER = np.int32(1 << 20)
_FREE_TEXT = (100, 0.02)  # tokens, and share of the vocabulary, beyond which a state is the inside of a text
_MAX_TAILS = 1000
_EFFORTS = ((8, 400), (4096, 20_000))
"""How often a greedy walk may come to places that look alike, and how many masks the other walk may ask for."""
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
        shortest = np.argsort(lengths, kind="stable").astype(np.int32)
        self.by_length = shortest[~never[shortest]]
        self.quotes = np.flatnonzero((ranks >= _EMPTY) & (ranks < _PUNCTUATION) & ~never)
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


class Words:
    """Texts that parts of one grammar match (``regex_words``), as tokens: what a mask cannot tell.

    Of ``(foo|bar)+baz`` or a pattern in a schema one sees from outside only which tokens may come next, and they may be
    the same for ever. ``tails``: the words and all that they end in, for a search that starts inside of one.
    """

    def __init__(self, words: Sequence[bytes], tokenize: Callable[[bytes], list[int]]) -> None:
        tails = dict.fromkeys(word[start:] for word in words for start in range(len(word)))
        self.tails = sorted((tokenize(tail) for tail in islice(tails, _MAX_TAILS)), key=len)
        self.firsts = np.array([tail[0] for tail in self.tails], np.int64)

    def fitting(self, state: Any, allowed: Array) -> Iterator[list[int]]:
        """The tails that ``state`` admits as a whole, shortest first."""
        for number in np.flatnonzero(allowed[self.firsts]) if self.tails else ():
            tail = self.tails[number]
            if state.validate_tokens(tail) == len(tail):
                yield tail


def find_closing(
    matcher: Any, order: ClosingOrder, words: Words, limit: int, *, broad: bool = True
) -> list[int] | None:
    """Tokens that lead ``matcher`` (left as it is) to an accepting state, at most ``limit``; None if none were found.

    The path is short, not proven to be the shortest. Greedy walks come first. Where they go in circles, a walk that
    prefers places it has not seen may find the way out; with ``broad`` it has more time, and detours are cut out.
    """
    if matcher.is_accepting():
        return []
    known = (words, None) if broad and words.tails else (words,)  # long tokens may be shorter than a word
    for circles, looks in _EFFORTS if broad else _EFFORTS[:1]:
        best: list[int] | None = None
        for texts in known:
            for outside in order.outside:
                shorter = limit if best is None else len(best) - 1
                path = _walk(matcher, order, texts, outside, shorter, circles)
                best = path if path is not None else best
        if best is None and limit > 0:
            path = _explore(matcher, order, words, looks)
            if path is not None:
                path = _straightened(matcher, path) if broad else path
                best = path if len(path) <= limit else None
        if best is not None:
            return best
    return None


def allowed_tokens(matcher: Any, size: int) -> Array:
    """Bool [size]: the tokens that the grammar allows next."""
    return _unpack(matcher.compute_bitmask(), size)


def _unpack(bits: bytes, size: int) -> Array:
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little").view(bool)


def _walk(
    matcher: Any, order: ClosingOrder, words: Words | None, outside: Array, limit: int, circles: int
) -> list[int] | None:
    """circles: how often places may look alike (rows of brackets do, and texts of a given length)."""
    state = matcher.deep_copy()
    path: list[int] = []
    seen: Counter[int] = Counter()
    while len(path) < limit:
        forced = state.compute_ff_tokens()
        if not forced:
            bits = state.compute_bitmask()
            seen[hash(bits)] += 1
            allowed = _unpack(bits, order.size)
            token = _first(allowed, order, outside)
            if token is None or seen[hash(bits)] > circles:
                return None
            forced = [token]
            if words is not None and order.outside[0][token] >= _VALUE and not allowed[order.quotes].any():
                forced = _to_quote(state, order, words, allowed) or forced
        if not state.consume_tokens(forced):
            return None
        path.extend(forced)
        if state.is_accepting():
            return path if len(path) <= limit else None
    return None


def _to_quote(state: Any, order: ClosingOrder, words: Words, allowed: Array) -> list[int] | None:
    """The rest of a word behind which the text, or all, may end."""
    for tail in words.fitting(state, allowed):
        child = state.deep_copy()
        child.consume_tokens(tail)
        if child.is_accepting() or allowed_tokens(child, order.size)[order.quotes].any():
            return tail
    return None


def _first(allowed: Array, order: ClosingOrder, outside: Array) -> int | None:
    free = np.count_nonzero(allowed) > order.free_text
    token = int(np.where(allowed, order.inside if free else outside, _NEVER).argmin())
    return token if allowed[token] else None


def _explore(matcher: Any, order: ClosingOrder, words: Words, looks: int) -> list[int] | None:
    """A walk that goes where it has been least often; places that allow the same tokens count as one.

    Any state is reached by single bytes, so those are what it tries beside the token that a greedy walk would take.
    looks: how many masks it may ask for.
    """
    state = matcher.deep_copy()
    path: list[int] = []
    bits = state.compute_bitmask()
    visits: Counter[int] = Counter()
    while looks > 0 and len(path) < looks:
        here = hash(bits)
        visits[here] += 1
        allowed = _unpack(bits, order.size)
        first = _first(allowed, order, order.outside[0])
        if first is None:
            return None
        steps = [[first]]
        if not visits[here] & (visits[here] - 1):  # looking around costs: at visits 1, 2, 4, 8 ...
            steps[:0] = words.fitting(state, allowed)
            steps += [[token] for token in _single_bytes(allowed, order) if token != first]
        best: tuple[int, list[int], Any, bytes] | None = None
        for step in steps:
            child = state.deep_copy()
            if not child.consume_tokens(step):
                continue
            if child.is_accepting():
                return path + step
            forced = child.compute_ff_tokens()
            if forced and child.consume_tokens(forced):
                step = step + forced
                if child.is_accepting():
                    return path + step
            there = child.compute_bitmask()
            looks -= 1
            count = visits[hash(there)]
            if best is None or count < best[0]:
                best = count, step, child, there
            if count == 0:
                break
        if best is None:
            return None
        path += best[1]
        state, bits = best[2], best[3]
    return None


def _single_bytes(allowed: Array, order: ClosingOrder) -> list[int]:
    """The shortest allowed token for each first byte; signs and digits come before letters."""
    ids = order.by_length[allowed[order.by_length]]
    firsts, where = np.unique(order.first_bytes[ids], return_index=True)
    letters = np.array([chr(byte).isalpha() for byte in firsts], bool)
    return [int(token) for token in ids[where[np.argsort(letters, kind="stable")]]]


def _straightened(matcher: Any, path: list[int]) -> list[int]:
    """``path`` without the parts behind which it stands where it stood before them."""
    state = matcher.deep_copy()
    places = [hash(state.compute_bitmask())]
    for token in path:
        state.consume_token(token)
        places.append(hash(state.compute_bitmask()) if not state.is_stopped() else 0)
    start = 0
    while start < len(path):
        for end in range(len(path) - 1, start, -1):
            shorter = path[:start] + path[end:]
            if places[start] == places[end] and _ends(matcher, shorter):
                path, places = shorter, places[:start] + places[end:]
                break
        start += 1
    return path


def _ends(matcher: Any, path: list[int]) -> bool:
    state = matcher.deep_copy()
    return bool(state.consume_tokens(path)) and bool(state.is_accepting())
