"""Growth: whether a cache of prefixes may take memory that no block has used yet.

Cached content costs nothing while it lies in memory that is committed anyway, so the pool may always commit up to
``HEADROOM`` times the most blocks that were ever in use at once. Beyond that, growth has to have paid: a block that is
computed again although it had been cached, and was evicted while uncommitted memory was left, is a regret, and each
regret allows one block more. A load that repeats nothing stays at the headroom; one that repeats a lot grows to the
size of what it repeats.

What was evicted is remembered by the hash of its whole prefix, no longer than the uncommitted memory could have kept
it. Two prefixes with the same hash can only move the bound by a block. No clock takes part: equal traces grow equally.
"""

from __future__ import annotations

HEADROOM = 2


class Growth:
    """The bound on committed blocks, and what was evicted because of it. Every operation is O(1)."""

    def __init__(self) -> None:
        self.num_regrets = 0
        self._evicted: dict[int, None] = {}  # oldest first

    def limit(self, peak_used: int) -> int:
        """Blocks that may be committed while cached ones could be evicted instead."""
        return HEADROOM * peak_used + self.num_regrets

    def evicted(self, digest: int, uncommitted: int) -> None:
        """The last block with this prefix is evicted while ``uncommitted`` blocks have never been needed."""
        self._evicted.pop(digest, None)
        if uncommitted:
            self._evicted[digest] = None
        while len(self._evicted) > uncommitted:
            del self._evicted[next(iter(self._evicted))]

    def computed(self, digest: int) -> None:
        """A block with this prefix was computed."""
        if digest in self._evicted:
            del self._evicted[digest]
            self.num_regrets += 1

    def restart(self) -> None:
        """Everything cached was thrown away on purpose: what growth was worth has to be shown again."""
        self.num_regrets = 0
        self._evicted.clear()
