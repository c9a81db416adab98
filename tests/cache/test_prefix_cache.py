"""Prefix matching: exact by construction, separated by tagged extras, never dangling."""

from __future__ import annotations

from paged_backend.cache.manager import CacheManager

SIZE = 4


def fill(cache: CacheManager, tokens: list[int], namespace: tuple = (), keep: bool = False):
    """Run a sequence of ``tokens`` through the cache as a finished (or kept) request."""
    table = cache.open(tokens, namespace)
    hits = cache.match(table, len(tokens))
    cache.adopt(table, hits)
    assert cache.reserve(table, len(hits) * SIZE, len(tokens))
    cache.commit(table, tokens, len(tokens))
    if not keep:
        cache.free(table)
    return len(hits) * SIZE


def test_a_repeated_prompt_hits_all_blocks_but_the_one_of_the_last_token():
    # vllm PR #11186, #17999: prompt length a multiple of the block size, fully cached, nothing left to compute
    cache = CacheManager(20, SIZE)
    prompt = list(range(2 * SIZE))
    assert fill(cache, prompt) == 0
    assert fill(cache, prompt) == SIZE
    assert fill(cache, [*prompt, 99]) == 2 * SIZE


def test_a_prompt_of_one_token_never_hits():
    cache = CacheManager(20, 1)
    table = cache.open([7])
    cache.reserve(table, 0, 1)
    cache.commit(table, [7], 1)
    cache.free(table)
    assert cache.match(cache.open([7]), 1) == []


def test_equal_blocks_after_different_prefixes_are_not_confused():
    cache = CacheManager(20, SIZE)
    fill(cache, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert fill(cache, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0


def test_tokens_whose_hashes_collide_are_not_confused():
    # hash trust (engines research 6.9): Python hashes an int modulo 2**61 - 1, and -1 as -2
    cache = CacheManager(20, SIZE)
    modulus = 2**61 - 1
    fill(cache, [1, 2, 3, 4, 9])
    collision = [1 + modulus, 2, 3, 4, 9]
    assert hash(tuple(collision)) == hash((1, 2, 3, 4, 9))
    assert fill(cache, collision) == 0


def test_an_adapter_name_is_never_a_salt():
    # vllm #44701
    cache = CacheManager(20, SIZE)
    cache.pool.release(cache.pool.allocate(10))  # so much is committed: nothing need be evicted
    prompt = list(range(9))
    fill(cache, prompt, (("adapter", "x"),))
    assert fill(cache, prompt, (("salt", "x"),)) == 0
    assert fill(cache, prompt) == 0
    assert fill(cache, prompt, (("adapter", "x"),)) == 8


def test_a_reloaded_adapter_or_new_weights_start_cold():
    # vllm #30931, #42125; lmdeploy #4917
    cache = CacheManager(20, SIZE)
    prompt = list(range(9))
    fill(cache, prompt, (("adapter", "a", 1), ("weights", 0)))
    assert fill(cache, prompt, (("adapter", "a", 2), ("weights", 0))) == 0
    assert fill(cache, prompt, (("adapter", "a", 1), ("weights", 1))) == 0


def test_nothing_is_published_before_the_step_has_succeeded():
    cache = CacheManager(20, SIZE)
    prompt = list(range(9))
    table = cache.open(prompt)
    cache.reserve(table, 0, 9)
    assert cache.match(cache.open(prompt), 9) == []
    cache.free(table)  # the step failed
    assert cache.match(cache.open(prompt), 9) == []


def test_two_that_fill_the_same_prefix_at_once_both_keep_their_blocks():
    cache = CacheManager(20, SIZE)
    prompt = list(range(9))
    one, two = cache.open(prompt), cache.open(prompt)
    for table in (one, two):
        cache.reserve(table, 0, 9)
    ids = list(two.block_ids)
    for table in (one, two):
        cache.commit(table, prompt, 9)
    assert list(two.block_ids) == ids
    cache.check([one, two])
    cache.free(one)
    assert len(cache.match(cache.open(prompt), 9)) == 2


def test_evicting_a_parent_leaves_children_that_hit_again_once_it_is_back():
    cache = CacheManager(4, SIZE)
    prompt = list(range(9))
    fill(cache, prompt)
    first = cache.match(cache.open(prompt), 9)[0]
    cache.pool.acquire(first)  # takes the head out of the order of eviction for a moment
    cache.pool.release([first])
    fill(cache, [50, 51, 52, 53, 54])
    assert fill(cache, prompt) in (0, 4, 8)
    cache.check([])


def test_disabled_prefix_caching_never_hits():
    cache = CacheManager(20, SIZE, prefix_caching=False)
    prompt = list(range(9))
    fill(cache, prompt)
    assert fill(cache, prompt) == 0
    assert cache.prefixes.num_cached_blocks == 0


def test_the_tree_is_empty_when_all_content_is_gone():
    cache = CacheManager(20, SIZE)
    for start in range(5):
        fill(cache, list(range(start, start + 9)))
    cache.reset_prefixes()
    assert cache.prefixes.num_cached_blocks == 0
    assert cache.prefixes._roots == {}


def test_sliding_window_hits_need_only_the_visible_blocks():
    # vllm #48435: hits of sliding-window models collapsed to 0
    cache = CacheManager(8, SIZE, window=6)
    prompt = list(range(24))
    table = cache.open(prompt)
    for done in range(SIZE, 24, SIZE):
        assert cache.reserve(table, done - SIZE, done)
        cache.commit(table, prompt, done)
    cache.free(table)
    fill(cache, [70, 71, 72, 73, 74, 75, 76, 77, 78])  # evicts the oldest blocks only
    again = cache.open(prompt)
    hits = cache.match(again, len(prompt))
    assert len(hits) == 5
    assert hits[0] == 0
    assert 0 not in hits[-2:]
    cache.adopt(again, hits)
    cache.check([again])


def test_a_follower_sees_who_computes_its_next_block():
    cache = CacheManager(20, SIZE)
    prompt = list(range(12))
    leader = cache.open(prompt, owner="leader")
    cache.reserve(leader, 0, 4)
    cache.lead(leader)
    follower = cache.open([*prompt, 1], owner="follower")
    assert cache.leader(follower, 0, 13) == "leader"
    cache.commit(leader, prompt, 4)
    assert cache.leader(follower, 1, 13) == "leader"
    cache.free(leader)
    assert cache.leader(follower, 1, 13) is None, "a dead leader must not be waited for"


def test_a_reset_takes_the_content_of_used_blocks_too_and_their_holders_publish_no_more():
    cache = CacheManager(20, SIZE)
    tokens = list(range(5 * SIZE))
    running = cache.open(tokens)
    cache.reserve(running, 0, 3 * SIZE)
    cache.commit(running, tokens, 2 * SIZE)
    cache.reset_prefixes()
    assert cache.match(cache.open(tokens), len(tokens)) == []
    cache.commit(running, tokens, 3 * SIZE)
    twin = cache.fork(running)
    cache.free(running)
    cache.check([twin])
    cache.free(twin)
    assert cache.prefixes.num_cached_blocks == 0
    assert fill(cache, tokens) == 0
    assert fill(cache, tokens) == 4 * SIZE, "the new tree works"
