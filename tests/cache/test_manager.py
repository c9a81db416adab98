"""Tables, copy-on-write, sliding windows, and the invariants under random traces."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_backend.cache.manager import CacheManager

SIZE = 4


def test_reserve_is_all_or_nothing():
    cache = CacheManager(3, SIZE)
    table = cache.open(range(20))
    assert not cache.reserve(table, 0, 12)
    assert len(table) == 0
    assert cache.reserve(table, 0, 8)


def answer(cache, prompt):
    """Compute ``prompt`` alone; returns how many of its blocks were hits."""
    table = cache.open(prompt)
    hits = cache.match(table, len(prompt))
    cache.adopt(table, hits)
    assert cache.reserve(table, len(hits) * SIZE, len(prompt))
    cache.commit(table, prompt, len(prompt))
    cache.free(table)
    cache.check([])
    return len(hits)


def test_prompts_that_never_return_commit_twice_the_peak_in_use():
    cache = CacheManager(1000, SIZE)
    for number in range(100):
        answer(cache, [number] * 3 * SIZE)
    assert (cache.pool.peak_used, cache.pool.num_committed) == (3, 6)


def test_prompts_that_return_grow_the_cache_until_all_of_them_stay():
    # 20 prompts in turn are the worst case of least recently used: without growth nobody would ever hit
    cache = CacheManager(1000, SIZE)
    prompts = [[number] * 3 * SIZE for number in range(20)]
    rounds = [sum(answer(cache, prompt) for prompt in prompts) for _ in range(6)]
    assert rounds[0] == 0
    assert rounds[-1] == 20 * 2, "all but the block of each prompt's last token"
    assert cache.pool.num_committed <= 20 * 3 + 6


def test_after_a_reset_nothing_is_regretted():
    cache = CacheManager(1000, SIZE)
    prompts = [[number] * 3 * SIZE for number in range(20)]
    for prompt in prompts:
        answer(cache, prompt)
    cache.reset_prefixes()
    answer(cache, prompts[0])
    assert cache.pool.growth.num_regrets == 0


def test_fork_shares_every_block_and_the_first_writer_copies_the_tail():
    cache = CacheManager(10, SIZE)
    one = cache.open(range(6))
    cache.reserve(one, 0, 6)
    cache.commit(one, range(6), 6)
    two = cache.fork(one)
    assert cache.pool.num_used == 2
    shared_tail = one.block_ids[1]
    assert cache.reserve(one, 6, 7)
    assert cache.take_copies() == [(shared_tail, one.block_ids[1])]
    assert one.block_ids[1] != shared_tail
    assert cache.reserve(two, 6, 7)
    assert cache.take_copies() == [], "the last one owns the tail and writes in place"
    cache.check([one, two])


def test_fork_at_a_block_boundary_copies_nothing():
    cache = CacheManager(10, SIZE)
    one = cache.open(range(8))
    cache.reserve(one, 0, 8)
    cache.commit(one, range(8), 8)
    two = cache.fork(one)
    cache.reserve(one, 8, 9)
    cache.reserve(two, 8, 9)
    assert cache.take_copies() == []
    assert one.block_ids[2] != two.block_ids[2]


def test_copy_on_write_that_does_not_fit_changes_nothing():
    cache = CacheManager(3, SIZE)
    one = cache.open(range(6))
    cache.reserve(one, 0, 6)
    two = cache.fork(one)
    assert not cache.reserve(one, 6, 7)
    cache.free(two)
    assert cache.reserve(one, 6, 7)
    assert cache.take_copies() == []


def test_a_copy_whose_owner_is_preempted_before_the_step_is_dropped():
    cache = CacheManager(10, SIZE)
    one = cache.open(range(6))
    cache.reserve(one, 0, 6)
    two = cache.fork(one)
    cache.reserve(two, 6, 7)
    cache.cut(two, want_free=1, num_computed=6)
    assert cache.take_copies() == []


def test_cut_frees_only_as_many_tail_blocks_as_wanted():
    cache = CacheManager(10, SIZE)
    table = cache.open(range(20))
    cache.reserve(table, 0, 20)
    cache.commit(table, range(20), 20)
    assert cache.cut(table, want_free=2, num_computed=20) == 12
    assert len(table) == 3
    cache.check([table])


def test_cut_keeps_no_block_that_was_reserved_but_not_computed():
    cache = CacheManager(10, SIZE)
    table = cache.open(range(20))
    cache.reserve(table, 0, 20)
    cache.commit(table, range(20), 10)
    assert cache.cut(table, want_free=1, num_computed=10) == 8
    assert len(table) == 2


def test_cut_of_shared_blocks_goes_on_until_something_became_free():
    cache = CacheManager(10, SIZE)
    one = cache.open(range(12))
    cache.reserve(one, 0, 12)
    cache.commit(one, range(12), 12)
    two = cache.fork(one)
    assert cache.cut(two, want_free=1, num_computed=12) == 0
    assert cache.pool.num_used == 3
    cache.check([one, two])


def test_live_blocks_of_a_sliding_sequence_stay_bounded():
    # engines research 6.10: live blocks <= ceil((window + chunk) / block) + 1, decoding three windows on
    window, chunk = 32, 7
    cache = CacheManager(200, SIZE, window=window)
    tokens = list(range(100 + 3 * window))
    table = cache.open(tokens[:100])
    done = 0
    while done < len(tokens):
        step = chunk if done < 100 else 1
        end = min(done + step, len(tokens))
        assert cache.reserve(table, done, end)
        assert cache.pool.num_used <= -(-(window + chunk) // SIZE) + 1
        done = end
        cache.commit(table, tokens, done)
        cache.check([table])
        # every key the next query can see is there
        first = max(done - window + 1, 0) // SIZE
        assert all(table.block_ids[first:])
    cache.free(table)
    cache.check([])


class CacheMachine(RuleBasedStateMachine):
    """Random add / step / fork / preempt / fail / free; ``check`` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(24, SIZE)
        self.live: list[list] = []  # [table, tokens, computed]

    @rule(start=st.integers(0, 2), length=st.integers(1, 40))
    def add(self, start, length):
        tokens = [start * 100 + i for i in range(length)]
        table = self.cache.open(tokens)
        hits = self.cache.match(table, length)
        revived = sum(self.cache.pool.is_free(b) for b in hits)
        if revived <= self.cache.pool.num_free:
            self.cache.adopt(table, hits)
        self.live.append([table, tokens, len(table) * SIZE])
        self.cache.lead(table)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 9), fails=st.booleans())
    def step(self, which, count, fails):
        item = self.live[which % len(self.live)]
        table, tokens, computed = item
        end = computed + count
        tokens.extend(range(1000, 1000 + max(end - len(tokens), 0)))
        if self.cache.reserve(table, computed, end):
            for source, copy in self.cache.take_copies():
                assert source != copy
            if not fails:
                item[2] = end
                self.cache.commit(table, tokens, end)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def fork(self, which):
        table, tokens, computed = self.live[which % len(self.live)]
        if computed and self.cache.blocks_for(computed) == len(table):
            self.live.append([self.cache.fork(table), list(tokens), computed])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), want=st.integers(1, 5))
    def preempt(self, which, want):
        item = self.live[which % len(self.live)]
        item[2] = self.cache.cut(item[0], want, item[2])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def free(self, which):
        self.cache.free(self.live.pop(which % len(self.live))[0])

    @rule()
    def reset(self):
        self.cache.reset_prefixes()

    @invariant()
    def holds(self):
        self.cache.check([item[0] for item in self.live])

    def teardown(self):
        for table, _, _ in self.live:
            self.cache.free(table)
        self.cache.check([])
        assert self.cache.pool.num_free == self.cache.pool.capacity


TestCacheTraces = CacheMachine.TestCase
TestCacheTraces.settings = settings(max_examples=150, stateful_step_count=60)
