"""The block pool: free list order, lazy eviction, counts that always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.cache.block_pool import BlockPool, OutOfBlocksError
from paged_backend.cache.growth import Growth
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
    assert pool.num_committed == 2
    assert pool.allocate(1) == [3], "fresh memory before throwing cached content away"
    assert pool.allocate(1) == [4]
    assert evicted == []
    assert pool.allocate(1) == [cached]
    assert evicted == [cached]


def one_after_another(pool, count):
    """Use ``count`` blocks, never two at once, and leave each cached."""
    blocks = []
    for _ in range(count):
        blocks += pool.allocate(1)
        pool.mark_cached(blocks[-1])
        pool.release(blocks[-1:])
    return blocks


def test_the_coldest_block_is_reused_once_twice_the_peak_in_use_is_committed():
    evicted = []
    pool = BlockPool(1000, evicted.append)
    assert one_after_another(pool, 5) == [1, 2, 1, 2, 1]
    assert evicted == [1, 2, 1]
    assert (pool.num_committed, pool.peak_used) == (2, 1)


def test_blocks_in_use_are_never_bounded_by_what_is_committed():
    pool = BlockPool(6)
    assert pool.allocate(2) + pool.allocate(3) == [1, 2, 3, 4, 5]


def test_each_regret_allows_one_block_more():
    pool = BlockPool(1000)
    one_after_another(pool, 5)
    pool.growth.evicted(77, pool.num_uncommitted)
    pool.growth.computed(77)
    pool.growth.computed(77)
    pool.growth.computed(78)
    one_after_another(pool, 9)
    assert (pool.growth.num_regrets, pool.num_committed) == (1, 3)


def test_what_is_remembered_of_the_evicted_is_no_longer_than_what_memory_is_left_for():
    growth = Growth()
    for digest in range(10):
        growth.evicted(digest, uncommitted=3)
    for digest in range(10):
        growth.computed(digest)
    assert growth.num_regrets == 3
    growth.evicted(5, uncommitted=0)
    growth.computed(5)
    assert growth.num_regrets == 3, "a full pool cannot grow, so nothing is regretted"


def test_memory_that_was_given_back_is_committed_anew():
    pool = BlockPool(8)
    _used, *others = pool.allocate(4)
    pool.release(others)
    pool.uncommit()
    pool.check()
    assert (pool.num_committed, pool.num_used, pool.num_free) == (1, 1, 6)
    assert pool.empty() == others, (
        "a page shared with one of them can go when its neighbour is given back later"
    )
    pool.uncommit()
    pool.check()
    assert pool.num_committed == 1, "nothing is given back twice"
    assert pool.allocate(1) == [2], "the lowest comes first"
    assert pool.num_committed == 2


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
    assert pool.empty() == blocks[1:]
    pool.check()


def test_of_the_free_blocks_the_coldest_are_dropped_and_those_that_hold_nothing_count_first():
    evicted = []
    pool = BlockPool(9, evicted.append)
    blocks = pool.allocate(6)
    for block in blocks[1:]:
        pool.mark_cached(block)
    pool.release(blocks[:5][::-1])
    pool.drop_cached(3)
    assert evicted == [blocks[4], blocks[3]]
    assert pool.empty() == [blocks[0], blocks[3], blocks[4]]
    pool.drop_cached(0)
    assert len(evicted) == 2
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("aafrcdg"), st.integers(0, 30)), max_size=120))
def test_any_trace_keeps_every_invariant(trace):
    pool = BlockPool(9)
    held: list[int] = []
    peak = 0
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
            pool.drop_cached(number)
        elif action == "g":
            pool.uncommit()
        pool.check()
        assert pool.num_used == len(set(held))
        assert pool.num_committed + pool.num_uncommitted == pool.capacity
        assert pool.num_committed <= pool.growth.limit(peak := max(peak, pool.num_used))
    pool.release(held)
    assert pool.num_free == pool.capacity
