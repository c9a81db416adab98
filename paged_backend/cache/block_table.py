"""BlockTable: the blocks one sequence holds, in the order of its tokens."""

from __future__ import annotations

from array import array

from paged_backend.cache.prefix_cache import PrefixNode


class BlockTable:
    """Append-only but for three things: a sliding window turns passed blocks into holes (the null block),
    copy-on-write swaps the tail before a step writes to it, and preemption cuts the tail.

    block_ids: int32 array; token ``i`` lives in ``block_ids[i // block_size]``.
    path: prefix nodes of the sequence's full blocks, as far as known (may run ahead of ``block_ids``: blocks to come).
    num_published: how many leading blocks the prefix cache already knows.
    num_holes: how many leading blocks the sliding window has passed.
    """

    __slots__ = ("block_ids", "num_holes", "num_published", "owner", "path", "root")

    def __init__(self, root: PrefixNode | None = None, owner: object | None = None) -> None:
        self.owner = owner
        self.block_ids = array("i")
        self.path: list[PrefixNode] = []
        self.root = root
        self.num_published = 0
        self.num_holes = 0

    def __len__(self) -> int:
        return len(self.block_ids)
