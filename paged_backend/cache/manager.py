"""CacheManager: the operations on tables that a scheduler needs, all of them all-or-nothing.

    open -> (match -> adopt) -> reserve -> [step] -> commit -> ... -> cut (preempt) or free

``fork`` shares every block; the first write to a shared, partly filled tail takes a copy of it (copy-on-write),
which the runner makes before the step (:meth:`take_copies`).

Invariants, executable as :meth:`CacheManager.check`:
I1 reference count == number of tables naming the block; I2 on the free list iff that is 0; I3 a cached block's
node lists it; I4 only full blocks are published; I5 along a table the published blocks form a prefix; I6 tables
are append-only as described in ``block_table``; I7 free + used + null == total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from paged_backend.cache.block_pool import NULL_BLOCK, BlockPool
from paged_backend.cache.block_table import BlockTable
from paged_backend.cache.prefix_cache import PrefixCache
from paged_backend.errors import PagedBackendError


class CacheManager:
    """num_blocks includes the null block. window: tokens a query can see when *every* layer slides, else None."""

    def __init__(
        self, num_blocks: int, block_size: int = 16, window: int | None = None, prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.prefix_caching = prefix_caching
        self.prefixes = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self._copies: dict[int, int] = {}  # destination -> source
        self.prefix_queries = 0
        self.prefix_hits = 0

    def _evict(self, block: int) -> None:
        node = self.prefixes.forget(block)
        if not node.blocks:
            self.pool.growth.evicted(node.digest, self.pool.num_uncommitted)

    @property
    def capacity_tokens(self) -> int:
        return self.pool.capacity * self.block_size

    def longest_sequence(self, chunk: int) -> int | None:
        """Tokens of the longest sequence that fits the pool alone, computed in steps of ``chunk``; None: any length."""
        if self.window is not None and self.blocks_for(self.window + chunk) + 1 <= self.pool.capacity:
            return None
        return self.capacity_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- a sequence's life ---------------------------------------------------------------------------------------

    def open(
        self, tokens: Sequence[int], namespace: tuple[Hashable, ...] = (), owner: object | None = None
    ) -> BlockTable:
        """A table for a sequence that starts with ``tokens``. Holds no blocks yet. owner: what :meth:`leader` names."""
        if not self.prefix_caching:
            return BlockTable(owner=owner)
        table = BlockTable(self.prefixes.root(namespace), owner)
        self.prefixes.hold(table.root)  # type: ignore[arg-type]
        self._extend_path(table, tokens, len(tokens) // self.block_size)
        return table

    def _extend_path(self, table: BlockTable, tokens: Sequence[int], num_blocks: int) -> None:
        if table.root is None or len(table.path) >= num_blocks:
            return
        size = self.block_size
        old = node = table.path[-1] if table.path else table.root
        for i in range(len(table.path), num_blocks):
            node = self.prefixes.child(node, tuple(tokens[i * size : (i + 1) * size]))
            table.path.append(node)
        self.prefixes.hold(node)  # before letting go of the old end, whose only tie this may be
        self.prefixes.unhold(old)

    def match(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Cached blocks that continue ``table``, of which the last token is never one: something must be computed.

        Under a sliding window the leading blocks may be gone (they come as null blocks) if those the next
        query can see are there. Changes nothing.
        """
        start = len(table)
        limit = min((num_tokens - 1) // self.block_size, len(table.path))
        if self.window is None:
            hits = []
            for i in range(start, limit):
                blocks = table.path[i].blocks
                if not blocks:
                    break
                hits.append(blocks[0])
            return hits
        if start:
            return []
        best, run = 0, 0
        for i in range(limit):
            run = run + 1 if table.path[i].blocks else 0
            if run and run >= i + 1 - self._first_visible_block((i + 1) * self.block_size):
                best = i + 1
        first = self._first_visible_block(best * self.block_size)
        return [NULL_BLOCK] * first + [table.path[i].blocks[0] for i in range(first, best)]

    def leader(self, table: BlockTable, num_hits: int, num_tokens: int) -> object | None:
        """Owner of the sequence that is computing the first block ``table`` misses, None if nobody is."""
        index = len(table) + num_hits
        if index >= min((num_tokens - 1) // self.block_size, len(table.path)):
            return None
        leader = table.path[index].leader
        return leader.owner if leader is not None and leader is not table else None

    def adopt(self, table: BlockTable, hits: Iterable[int]) -> None:
        """Take the blocks that :meth:`match` returned into the table."""
        for block in hits:
            if block == NULL_BLOCK:
                table.num_holes += 1
            else:
                self.pool.acquire(block)
            table.block_ids.append(block)
            table.num_published = len(table)

    def lead(self, table: BlockTable) -> None:
        """Announce that ``table``'s owner computes the rest of its known path now."""
        for node in table.path[table.num_published :]:
            if node.leader is None:
                node.leader = table

    def _unlead(self, table: BlockTable) -> None:
        for node in table.path[table.num_published :]:
            if node.leader is table:
                node.leader = None

    def missing(self, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        """Free blocks needed so that tokens ``num_computed`` .. ``num_tokens - 1`` can be written."""
        need = max(self.blocks_for(num_tokens) - len(table), 0)
        return need + (1 if self._tail_is_shared(table, num_computed) else 0)

    def _tail_is_shared(self, table: BlockTable, num_computed: int) -> bool:
        if num_computed % self.block_size == 0:
            return False
        return self.pool.ref_counts[table.block_ids[num_computed // self.block_size]] > 1

    def reserve(self, table: BlockTable, num_computed: int, num_tokens: int) -> bool:
        """Make room for tokens up to ``num_tokens``; False and no change if the pool has not enough free blocks."""
        need = self.missing(table, num_computed, num_tokens)
        if need > self.pool.num_free:
            return False
        if need:
            blocks = self.pool.allocate(need)
            if self._tail_is_shared(table, num_computed):
                tail = num_computed // self.block_size
                source, copy = table.block_ids[tail], blocks.pop()
                self._copies[copy] = source
                table.block_ids[tail] = copy
                self.pool.release([source])
            table.block_ids.extend(blocks)
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], num_computed: int) -> None:
        """After a successful step: publish blocks that became full and free those the window has passed."""
        if table.root is not None and not self.prefixes.is_current(table.root):
            self._leave_tree(table)  # what it computes rests on content from before a reset
        full = num_computed // self.block_size
        if full > table.num_published and table.root is not None:
            self._extend_path(table, tokens, full)
            for i in range(table.num_published, full):
                node, block = table.path[i], table.block_ids[i]
                # a forked sibling may have published this very block; another one with the same content is kept too
                if block != NULL_BLOCK and block not in node.blocks:
                    self.pool.growth.computed(node.digest)
                    self.prefixes.publish(node, block)
                    self.pool.mark_cached(block)
                if node.leader is table:
                    node.leader = None
            table.num_published = full
        if self.window is not None:
            passed = min(self._first_visible_block(num_computed), len(table))
            if passed > table.num_holes:
                dead = table.block_ids[table.num_holes : passed]
                for i in range(table.num_holes, passed):
                    table.block_ids[i] = NULL_BLOCK
                table.num_holes = passed
                self.pool.release(reversed(dead))

    def _first_visible_block(self, position: int) -> int:
        """First block that a query at ``position`` can see under the sliding window."""
        window = self.window if self.window is not None else position + 1
        return max(position - window + 1, 0) // self.block_size

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; nothing is copied until one of the two writes to a shared tail."""
        twin = BlockTable(table.root)  # never a leader, so it needs no owner
        twin.block_ids = table.block_ids[:]
        twin.path = list(table.path)
        twin.num_published, twin.num_holes = table.num_published, table.num_holes
        for block in twin.block_ids:
            if block != NULL_BLOCK:
                self.pool.acquire(block)
        if twin.root is not None:
            self.prefixes.hold(twin.path[-1] if twin.path else twin.root)
        return twin

    def cut(self, table: BlockTable, want_free: int, num_computed: int) -> int:
        """Give up tail blocks until ``want_free`` have become free or none is left; returns how many tokens remain.

        Only full, computed blocks stay. With holes in the table what would remain cannot be continued (its window is
        gone), so all of it goes.
        """
        self._unlead(table)
        before = self.pool.num_free
        keep = 0 if table.num_holes else num_computed // self.block_size
        while len(table) > keep or (len(table) and self.pool.num_free - before < want_free):
            block = table.block_ids.pop()
            self._copies.pop(block, None)
            self.pool.release([block])
            table.num_holes = min(table.num_holes, len(table))
        table.num_published = min(table.num_published, len(table))
        return len(table) * self.block_size

    def free(self, table: BlockTable) -> None:
        """End of a sequence. Full blocks stay in the prefix cache until their memory is needed."""
        self._leave_tree(table)
        for block in table.block_ids:
            self._copies.pop(block, None)
        self.pool.release(reversed(table.block_ids))  # the tail goes first, so that it is evicted first
        del table.block_ids[:]
        table.num_published = table.num_holes = 0

    def _leave_tree(self, table: BlockTable) -> None:
        """It neither finds nor publishes anything from now on."""
        self._unlead(table)
        if table.root is not None:
            self.prefixes.unhold(table.path[-1] if table.path else table.root)
        table.path, table.root = [], None

    # --- for the engine ------------------------------------------------------------------------------------------

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pairs that must be copied before the next step; each is handed out once."""
        copies = [(source, copy) for copy, source in self._copies.items()]
        self._copies.clear()
        return copies

    def reset_prefixes(self) -> None:
        """Forget all cached content, as when the weights are new: nothing that was computed before, nor what running
        sequences compute from it, is a hit for anybody. A table that has no blocks yet belongs into the new tree:
        :meth:`free` it and :meth:`open` another.
        """
        self.prefixes.reset()
        self.pool.forget_cached()
        self.pool.growth.restart()

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise :class:`PagedBackendError` if an invariant is broken. ``tables``: all that are open."""
        self.pool.check()
        counts: Counter[int] = Counter()
        for table in tables:
            counts.update(b for b in table.block_ids if b != NULL_BLOCK)
            if any(b != NULL_BLOCK for b in table.block_ids[: table.num_holes]):
                raise PagedBackendError("a block that the window has passed is still held")
            if NULL_BLOCK in table.block_ids[table.num_holes :]:
                raise PagedBackendError("a null block stands where tokens are visible")
            if table.root is not None and table.num_published > len(table.path):
                raise PagedBackendError("more blocks are published than have a place in the prefix tree")
        for block in range(1, len(self.pool.ref_counts)):
            if self.pool.ref_counts[block] != counts[block]:
                raise PagedBackendError(
                    f"block {block} has {self.pool.ref_counts[block]} references, {counts[block]} tables name it"
                )
        self.prefixes.check(range(1, len(self.pool.ref_counts)))
