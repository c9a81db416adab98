"""Free list and reference counts of KV blocks.

Block 0 is the null block: never handed out, it fills holes and padding in tables. The free list is a doubly linked
ring threaded through two lists with block 0 as its head, so every operation is O(1) and no branch handles an
empty end. Its front holds blocks without reusable content (last freed first, still warm in the CPU's
caches), its back holds cached blocks in order of last use. A free cached block keeps its content until it is handed out
("lazy eviction"): free and cached are one state, with no second budget.

Blocks are numbered from 1 in the order they are first needed; the pool grows one block at a time up to its limit, so
memory behind the higher numbers is not touched before it is needed. A block's memory is committed from when it is
handed out until it is given back; blocks that were given back are on no list and are the first to be committed again.
Where only cached blocks are free, ``growth`` says whether the coldest is evicted or another block is committed.

Invariants, executable as :meth:`BlockPool.check`: a committed block is on the free list iff its reference count is 0;
an uncommitted one is neither used nor cached; free + used + null == total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paged_backend.cache.growth import Growth
from paged_backend.errors import PagedBackendError

NULL_BLOCK = 0


class OutOfBlocksError(PagedBackendError):
    """More blocks were asked for than are free. Nothing was allocated."""


class BlockPool:
    """``num_blocks`` includes the null block. ``on_evict(block)`` is called before a cached block is handed out."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0]
        self._cached = bytearray(1)
        self._previous = [NULL_BLOCK]
        self._next = [NULL_BLOCK]
        self._num_listed = 0
        self._given_back: list[int] = []  # the next to be committed again is the last
        self.peak_used = 0
        self.growth = Growth()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        return self._num_listed + self.num_uncommitted

    @property
    def num_used(self) -> int:
        return self.num_committed - self._num_listed

    @property
    def num_committed(self) -> int:
        """Blocks that were handed out since the start or since their memory was last given back."""
        return len(self.ref_counts) - 1 - len(self._given_back)

    @property
    def num_uncommitted(self) -> int:
        return self.num_blocks - len(self.ref_counts) + len(self._given_back)

    @property
    def capacity(self) -> int:
        """Blocks that can hold tokens at once."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with reference count 1, or raise :class:`OutOfBlocksError` and change nothing."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked, {self.num_free} of {self.capacity} free")
        blocks = [self._take() for _ in range(count)]
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def _take(self) -> int:
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK or (self._cached[block] and self._may_grow()):
            return self._commit()
        self._unlink(block)
        if self._cached[block]:
            self._on_evict(block)
            self._cached[block] = 0
        self.ref_counts[block] = 1
        return block

    def _may_grow(self) -> bool:
        return self.num_uncommitted > 0 and self.num_committed < self.growth.limit(self.peak_used)

    def _commit(self) -> int:
        if self._given_back:
            block = self._given_back.pop()
            self.ref_counts[block] = 1
            return block
        self.ref_counts.append(1)
        self._cached.append(0)
        self._previous.append(NULL_BLOCK)
        self._next.append(NULL_BLOCK)
        return len(self.ref_counts) - 1

    def acquire(self, block: int) -> None:
        """One more reference to a used block or a free cached one."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
            self.peak_used = max(self.peak_used, self.num_used)
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each; null blocks are skipped. Give a chain's tail first, so that it is evicted first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_counts[block] <= 0:
                raise PagedBackendError(f"block {block} was released more often than it was acquired")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._link(block, at_back=bool(self._cached[block]))

    def is_free(self, block: int) -> bool:
        return self.ref_counts[block] == 0

    def mark_cached(self, block: int) -> None:
        """The (used) block's content can be reused after it is freed."""
        self._cached[block] = 1

    def drop_cached(self, least: int | None = None) -> None:
        """Make all free blocks hold nothing, or at least ``least`` of those that are committed, the coldest first."""
        left = self._num_listed if least is None else least
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and left > 0:
            following = self._next[block]
            if self._cached[block]:
                self._on_evict(block)
                self._cached[block] = 0
            left -= 1
            block = following
        self.growth.restart()

    def forget_cached(self) -> None:
        """No block holds content that can be reused, the used ones included; nobody is told."""
        self._cached = bytearray(len(self._cached))

    def empty(self) -> list[int]:
        """Blocks that were used before and hold nothing of value now, ascending; those given back are among them."""
        return [b for b in range(1, len(self.ref_counts)) if not self.ref_counts[b] and not self._cached[b]]

    def uncommit(self) -> None:
        """The memory of all blocks that are :meth:`empty` is the system's again."""
        blocks = self.empty()
        for block in set(blocks).difference(self._given_back):
            self._unlink(block)
        self._given_back = blocks[::-1]
        self.peak_used = self.num_used

    def _link(self, block: int, at_back: bool) -> None:
        before = self._previous[NULL_BLOCK] if at_back else NULL_BLOCK
        after = self._next[before]
        self._previous[block], self._next[block] = before, after
        self._next[before] = self._previous[after] = block
        self._num_listed += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._num_listed -= 1

    def check(self) -> None:
        """Raise if an invariant is broken. O(blocks ever used)."""
        listed = set()
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            if block in listed or self._previous[self._next[block]] != block:
                raise PagedBackendError(f"free list is broken at block {block}")
            listed.add(block)
            block = self._next[block]
        gone = set(self._given_back)
        if len(gone) != len(self._given_back) or any(self.ref_counts[b] or self._cached[b] for b in gone):
            raise PagedBackendError(f"given back, but used, cached or twice: {sorted(self._given_back)}")
        free = {b for b in range(1, len(self.ref_counts)) if self.ref_counts[b] == 0} - gone
        if listed != free or len(listed) != self._num_listed:
            raise PagedBackendError(f"on the free list but used, or the reverse: {sorted(listed ^ free)}")
        if self.num_free + self.num_used + 1 != self.num_blocks:
            raise PagedBackendError("free + used + null != total")
