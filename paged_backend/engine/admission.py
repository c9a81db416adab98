"""What admission needs to know: how long outputs tend to be, and what the pool will hold at its peak.

The *future peak* is LightLLM's idea: requests finish one after another, and just before the i-th finishes all that are
left hold what they have grown to by then; the largest of these sums must fit the pool. How much a request will still
grow is the smaller of what it may and a quantile of the lengths seen so far. The quantile is low: taking a few tail
blocks back when the guess fails costs far less than leaving a third of the pool empty (measured on ShareGPT-like
lengths: 91 % of the pool allocated and 8 % of the tokens computed again at 0.35; 67 % and 7 % at 0.9).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.request import Request


class OutputLengths:
    """The last finished requests' output lengths; ``expect`` guesses how many more tokens a request will make."""

    def __init__(self, quantile: float = 0.35, memory: int = 256) -> None:
        self._quantile = quantile
        self._memory = memory
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self._memory:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def expect(self, done: int, unknown: int = 128) -> int:
        """Further tokens of a request that has made ``done``; ``unknown`` is assumed before any has finished."""
        longer = bisect_right(self._sorted, done)
        count = len(self._sorted) - longer
        if count:
            return self._sorted[longer + int((count - 1) * self._quantile + 0.5)] - done
        return max(16, done // 4) if self._sorted else unknown

    def expected_left(self, request: Request) -> int:
        """Further tokens of ``request``; exact where it goes on to its limit whatever it says."""
        done = request.num_output_tokens
        allowed = request.max_tokens - done
        return allowed if request.params.ignore_eos else max(min(allowed, self.expect(done)), 1)


class FuturePeak:
    """The blocks that the running requests will hold at their peak, and what a further one adds.

    Blocks that several sequences share are counted once, with the sequence that had them first. Holds for the moment it
    was made: make a new one when a request was admitted.
    """

    def __init__(self, cache: CacheManager, lengths: OutputLengths, running: Iterable[Request]) -> None:
        self._cache = cache
        self._lengths = lengths
        self._base = cache.pool.num_used  # what is in use but belongs to none of the rows
        rows = []  # (tokens still to come, tokens now, blocks shared)
        for request in running:
            self._base -= len(request.table) - request.num_shared - request.table.num_holes
            rows.append((lengths.expected_left(request), len(request.token_ids), request.num_shared))
        rows.sort(reverse=True)
        self._rows = rows

    def with_candidate(self, candidate: Request, hits: Sequence[int]) -> int:
        """Upper bound of the blocks in use at any time to come if ``candidate`` joins, adopting ``hits``."""
        size, window, base = self._cache.block_size, self._cache.window, self._base
        left, length = self._lengths.expected_left(candidate), len(candidate.token_ids)
        shared = sum(1 for b in hits if b and not self._cache.pool.is_free(b))
        if len(candidate.table):  # it comes back from preemption with blocks of its own
            base -= len(candidate.table) - candidate.num_shared
            shared += candidate.num_shared
        rows = self._rows.copy()
        insort(rows, (left, length, shared), key=_longest_first)
        for _ in range(candidate.seats - 1):
            insort(rows, (left, length, length // size), key=_longest_first)
        base = max(base, 0)
        if window is not None:
            return base + sum(-(-min(length + left, window + size) // size) + 1 for left, length, _ in rows)
        peak = tokens = 0
        for count, (left, length, shared) in enumerate(rows, 1):
            # just before this row ends, it and those that outlive it have all grown by ``left``
            tokens += length - shared * size
            total = tokens + count * (left + size - 1)
            if total > peak:
                peak = total
        return base + peak // size


def _longest_first(row: tuple[int, int, int]) -> int:
    return -row[0]
