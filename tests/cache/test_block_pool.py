"""The block pool: free list order, lazy eviction, counts that always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.cache.block_pool import BlockPool, OutOfBlocksError
from paged_backend.errors import PagedBackendError


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert 0 not in pool.allocate(4)
    assert pool.num_free == 0


def test_allocation_beyond_the_pool_raises_and_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert (pool.num_free, pool.num_used) == (1, 2)
    pool.check()


def test_blocks_without_content_are_reused_before_fresh_and_before_cached_ones():
    evicted = []
    pool = BlockPool(5, evicted.append)
    plain, cached = pool.allocate(2)
    pool.mark_cached(cached)
    pool.release([cached, plain])
    assert pool.allocate(1) == [plain]
    assert pool.allocate(1) == [3], "fresh memory before throwing cached content away"
    assert pool.allocate(1) == [4]
    assert evicted == []
    assert pool.allocate(1) == [cached]
    assert evicted == [cached]


def test_cached_blocks_are_evicted_in_order_of_last_use():
    evicted = []
    pool = BlockPool(4, evicted.append)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.mark_cached(block)
    pool.release([a, b, c])
    pool.acquire(a)  # a hit: used again, so it becomes the most recent
    pool.release([a])
    pool.allocate(2)
    assert evicted == [b, c]


def test_a_free_cached_block_can_be_acquired_from_the_middle_of_the_list():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.mark_cached(block)
    pool.release([a, b, c])
    pool.acquire(b)
    pool.check()
    assert pool.num_used == 1


def test_releasing_more_often_than_acquiring_raises():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(PagedBackendError, match="released more often"):
        pool.release([block])


def test_pool_grows_only_as_far_as_needed():
    pool = BlockPool(1_000_000)
    blocks = pool.allocate(3)
    pool.release(blocks)
    pool.allocate(3)
    assert len(pool.ref_counts) == 4


def test_dropped_cache_can_be_given_back():
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.mark_cached(block)
    pool.release(blocks[1:])
    pool.drop_cached()
    assert pool.free_uncached() == blocks[1:]
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("aafrcd"), st.integers(0, 30)), max_size=120))
def test_any_trace_keeps_every_invariant(trace):
    pool = BlockPool(9)
    held: list[int] = []
    for action, number in trace:
        if action == "a" and number % 4 <= pool.num_free:
            held += pool.allocate(number % 4)
        elif action == "f" and held:
            pool.release([held.pop(number % len(held))])
        elif action == "r" and held:
            held.append(held[number % len(held)])
            pool.acquire(held[-1])
        elif action == "c" and held:
            pool.mark_cached(held[number % len(held)])
        elif action == "d":
            pool.drop_cached()
        pool.check()
        assert pool.num_used == len(set(held))
    pool.release(held)
    assert pool.num_free == pool.capacity
