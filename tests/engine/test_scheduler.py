"""Scheduling: who computes what, when; proofs by trace, on the real cache, without a model."""

from __future__ import annotations

import random

import pytest

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.admission import OutputLengths
from paged_backend.engine.request import Request, Status
from paged_backend.engine.scheduler import Scheduler
from paged_backend.engine.waiting_queue import WaitingQueue
from paged_backend.sampling_params import SamplingParams

SIZE = 16


class Trace:
    """A scheduler driven by hand: each request makes exactly ``outputs[request]`` tokens."""

    def __init__(self, num_blocks: int, seats: int = 64, budget: int = 64, window: int | None = None) -> None:
        self.cache = CacheManager(num_blocks, SIZE, window)
        self.scheduler = Scheduler(self.cache, max_num_seqs=seats, max_num_batched_tokens=budget)
        self.outputs: dict[Request, int] = {}
        self.finished: list[Request] = []
        self.steps = 0
        self.useful = 0

    def add(self, prompt, output: int, max_tokens: int | None = None, **params) -> Request:
        tokens = (
            [random.Random(len(self.outputs)).randrange(10**9) for _ in range(prompt)]
            if isinstance(prompt, int)
            else list(prompt)
        )
        resolved = SamplingParams(max_tokens=max_tokens or output, **params).resolved()
        request = Request(str(len(self.outputs)), tokens, resolved)
        self.outputs[request] = output
        self.scheduler.add(request)
        return request

    def step(self) -> dict[Request, int]:
        picked = self.scheduler.schedule()
        self.cache.take_copies()
        self.steps += 1
        for request, count in picked.items():
            request.num_computed += count
            self.cache.commit(request.table, request.token_ids, request.num_computed)
            if request.num_pending == 0:
                request.token_ids.append(random.Random(len(request.token_ids)).randrange(10**9))
                if request.num_output_tokens >= self.outputs[request]:
                    self.useful += len(request.token_ids) - 1
                    self.finished.append(request)
                    self.scheduler.finish(request, natural=True)
        self.cache.check([r.table for r in self.scheduler.requests()])
        return picked

    def drain(self, limit: int = 20_000) -> None:
        while self.scheduler.has_work:
            assert self.step(), "requests wait but nothing was scheduled"
            assert self.steps < limit
        assert self.cache.pool.num_free == self.cache.pool.capacity


def test_running_decodes_come_before_prefill_chunks_and_before_new_requests():
    trace = Trace(100, budget=16)
    decoding = trace.add(4, 50)
    trace.step()
    long = trace.add(100, 5)
    trace.step()
    late = trace.add(3, 5)
    picked = trace.step()
    assert list(picked.items()) == [(decoding, 1), (long, 15)]
    assert late.status is Status.WAITING


def test_one_budget_bounds_every_step_and_prompts_are_split_to_fit():
    trace = Trace(200, budget=32)
    for length in (100, 7, 64, 1, 33):
        trace.add(length, 9)
    while trace.scheduler.has_work:
        assert sum(trace.step().values()) <= 32


def test_a_decode_never_waits_for_a_long_prompt():
    # Sarathi: the largest gap between tokens is one step, whatever enters
    trace = Trace(400, budget=16)
    decoding = trace.add(4, 60)
    trace.step()
    trace.add(3000, 1)
    for _ in range(50):
        assert trace.step()[decoding] == 1


def test_lengths_that_are_known_never_lead_to_preemption():
    trace = Trace(40)
    for i in range(40):
        trace.add(10 + i * 3, 40 + (i * 37) % 90, ignore_eos=True)
    trace.drain()
    assert trace.scheduler.stats.num_preemptions == 0


def test_a_generous_max_tokens_does_not_halve_the_batch():
    modest, generous = Trace(60), Trace(60)
    for trace, limit in ((modest, None), (generous, 800)):
        for _ in range(60):
            trace.add(30, 40, max_tokens=limit)
        trace.drain()
    assert generous.steps <= 1.25 * modest.steps


@pytest.mark.parametrize("seed", range(20))
def test_two_requests_on_a_pool_just_too_small_for_both_waste_little_work(seed):
    # preemption livelock: vllm #25538, #18115; vllm-ascend #16315
    rnd = random.Random(seed)
    a, b = rnd.randint(50, 300), rnd.randint(50, 300)
    peak = -(-(60 + a) // SIZE) + -(-(60 + b) // SIZE)
    trace = Trace(max(peak - 1, -(-(60 + max(a, b)) // SIZE)) + 1)
    for output in (a, b):
        trace.add(60, output, max_tokens=600)
    trace.drain()
    assert trace.scheduler.stats.scheduled_tokens <= 1.5 * trace.useful


@pytest.mark.parametrize("seed", range(30))
def test_a_pool_too_small_for_the_guessed_lengths_wastes_little_work(seed):
    rnd = random.Random(seed)
    trace = Trace(rnd.randint(30, 60), seats=rnd.choice([2, 8, 64]), budget=rnd.choice([16, 64, 512]))
    for _ in range(40):
        trace.add(rnd.randint(1, 200), rnd.randint(1, 200), max_tokens=250)
    trace.drain()
    assert trace.scheduler.stats.scheduled_tokens <= 1.5 * trace.useful


def test_the_oldest_running_request_is_never_preempted_and_always_progresses():
    trace = Trace(30)
    rnd = random.Random(5)
    for _ in range(30):
        trace.add(rnd.randint(1, 150), rnd.randint(50, 250), max_tokens=300)
    while trace.scheduler.has_work:
        live = trace.scheduler.requests()
        oldest = min(live, key=lambda r: r.order)
        was_running = oldest.status is Status.RUNNING
        before = oldest.num_computed
        trace.step()
        if was_running and oldest.status is not Status.FINISHED:
            assert oldest.status is Status.RUNNING
            assert oldest.num_computed > before


def test_preemption_takes_the_youngest_and_only_its_tail():
    trace = Trace(12, budget=200)
    old = trace.add(60, 100, max_tokens=100)
    trace.step()
    young = trace.add(60, 100, max_tokens=100)
    trace.scheduler.lengths.add(2)  # the guess says both fit
    while young.status is not Status.PREEMPTED:
        trace.step()
        assert old.status is Status.RUNNING
    assert len(young.table) > 0, "only what was needed is taken"
    trace.drain()


def test_a_large_request_is_admitted_within_bounded_steps_while_small_ones_stream_in():
    # head-of-line blocking and starvation: vllm #31731, PR #35852
    trace = Trace(40)
    for _ in range(8):
        trace.add(30, 40, ignore_eos=True)
    trace.step()
    large = trace.add(400, 100, ignore_eos=True)
    admitted_small_before = 0
    for _ in range(1000):
        trace.add(20, 20, ignore_eos=True)
        trace.step()
        if large.status is not Status.WAITING:
            break
        admitted_small_before += 1
    assert large.status is not Status.WAITING
    assert admitted_small_before < 400


def test_small_requests_pass_a_large_one_that_does_not_fit_yet():
    trace = Trace(40)
    trace.add(200, 200, ignore_eos=True)
    trace.step()
    large = trace.add(400, 100, ignore_eos=True)
    small = trace.add(10, 5, ignore_eos=True)
    for _ in range(30):
        trace.step()
    assert small.status is Status.FINISHED
    assert large.status is Status.WAITING


def test_smaller_priority_runs_first_and_the_overtaken_are_promoted_in_the_end():
    trace = Trace(100, seats=1)
    trace.scheduler.waiting.max_overtakes = 20
    trace.add(10, 3)
    trace.step()
    low = trace.add(10, 3, priority=5)
    high = trace.add(10, 3, priority=-1)
    while high.status is not Status.FINISHED:
        trace.step()
        assert low.status is Status.WAITING
    served = 0
    while low.status is not Status.FINISHED:
        trace.add(10, 3, priority=-1)
        trace.step()
        served += 1
        assert served < 200


def test_only_who_came_later_counts_as_overtaking():
    trace = Trace(400, seats=1)
    trace.scheduler.waiting.max_overtakes = 5
    early = [trace.add(10, 3, priority=0) for _ in range(20)]
    low = trace.add(10, 3, priority=5)
    while low.status is not Status.FINISHED:
        trace.step()
    assert trace.finished == [*early, low]


def test_a_request_behind_one_that_was_promoted_is_promoted_by_its_own_count():
    trace = Trace(400, seats=1)
    trace.scheduler.waiting.max_overtakes = 10
    first, second = trace.add(10, 3, priority=5), trace.add(10, 3, priority=3)
    for _ in range(40):
        trace.add(10, 3, priority=-1)
    while second.status is not Status.FINISHED:
        trace.step()
    assert trace.finished.index(first) == 10
    assert trace.finished.index(second) == 11


def test_high_priority_is_preempted_last():
    trace = Trace(12, budget=200)
    low = trace.add(60, 100, max_tokens=100, priority=1)
    trace.step()
    high = trace.add(60, 100, max_tokens=100, priority=0)
    trace.scheduler.lengths.add(2)
    while low.status is not Status.PREEMPTED:
        trace.step()
        assert high.status is not Status.PREEMPTED
    trace.drain()


def test_what_is_being_computed_is_not_computed_twice():
    document = list(range(10**6, 10**6 + 500))
    trace = Trace(200, budget=64)
    for i in range(32):
        trace.add([*document, i, i + 1], 4)
    trace.drain()
    assert trace.scheduler.stats.scheduled_tokens < 500 + 32 * 30


def test_if_the_leader_dies_a_follower_leads():
    document = list(range(10**6, 10**6 + 500))
    trace = Trace(200, budget=64)
    leader = trace.add([*document, 1], 4)
    followers = [trace.add([*document, i], 4) for i in range(2, 5)]
    trace.step()
    assert all(f.status is Status.WAITING for f in followers)
    trace.scheduler.finish(leader)
    trace.step()
    assert followers[0].status is Status.RUNNING
    assert followers[1].status is Status.WAITING
    trace.drain()


def test_a_request_for_n_samples_takes_n_seats_or_none():
    # vllm PR #53936: seats = 3, n = 4: all or nothing
    trace = Trace(100, seats=4)
    trace.add(10, 30)
    trace.step()
    many = trace.add(10, 5, n=4)
    one = trace.add(10, 5)
    trace.step()
    assert many.status is Status.WAITING
    assert one.status is Status.RUNNING


def test_aborting_in_any_state_frees_every_block():
    # KV leak on abort: vllm #46283; sglang #6778, #20010
    rnd = random.Random(3)
    for trial in range(30):
        trace = Trace(rnd.randint(25, 60))
        for _ in range(12):
            trace.add(rnd.randint(1, 200), rnd.randint(1, 150), max_tokens=150)
        for _ in range(rnd.randint(0, 200)):
            if trace.scheduler.has_work:
                trace.step()
            if rnd.random() < 0.1 and trace.scheduler.requests():
                trace.scheduler.finish(rnd.choice(trace.scheduler.requests()))
        for request in trace.scheduler.requests():
            trace.scheduler.finish(request)
        assert trace.cache.pool.num_free == trace.cache.pool.capacity, trial
        trace.cache.check([])


def test_a_sliding_window_model_serves_requests_longer_than_the_pool():
    trace = Trace(12, budget=32, window=64)
    trace.add(600, 100)
    trace.add(300, 50)
    trace.drain()
    assert len(trace.finished) == 2


@pytest.mark.parametrize("seed", range(40))
def test_every_request_of_a_random_trace_finishes(seed):
    rnd = random.Random(seed)
    window = rnd.choice([None, None, 40])
    trace = Trace(rnd.randint(28, 80), rnd.choice([1, 3, 64]), rnd.choice([64, 100, 512]), window)
    documents = [[d * 1000 + i for i in range(150)] for d in range(2)]
    pending = 40
    while pending or trace.scheduler.has_work:
        if pending and rnd.random() < 0.3:
            pending -= 1
            head = rnd.choice([[], documents[0], documents[1]])[: rnd.randint(0, 150)]
            prompt = [*head, *(rnd.randrange(10**9) for _ in range(rnd.randint(1, 100)))]
            trace.add(prompt, rnd.randint(1, 150), max_tokens=170, priority=rnd.choice([0, 0, 0, 1]))
        trace.step()
        assert trace.steps < 20_000
    assert len(trace.finished) == 40
    assert trace.cache.pool.num_free == trace.cache.pool.capacity


@pytest.mark.parametrize("seats", [4, 64])
def test_a_step_looks_at_a_bounded_number_of_those_that_wait(seats, monkeypatch):
    def never(queue):
        raise AssertionError("a step went through all that wait")

    def looks(waiting: int) -> int:
        trace = Trace(30, seats=seats)
        shared = list(range(40))
        for i in range(4 + waiting):
            prompt = [*shared, i] if i % 3 == 0 else [i + 1000] * 60
            trace.add(prompt, 60, priority=i % 2)
        count, match = [0], trace.cache.match

        def counted(*args):
            count[0] += 1
            return match(*args)

        monkeypatch.setattr(trace.cache, "match", counted)
        with monkeypatch.context() as patch:
            patch.setattr(WaitingQueue, "__iter__", never)
            for _ in range(100):
                for request, tokens in trace.scheduler.schedule().items():
                    request.num_computed += tokens
                    trace.cache.commit(request.table, request.token_ids, request.num_computed)
                    if request.num_pending == 0:
                        request.token_ids.append(1)
        assert trace.scheduler.stats.num_preemptions > 0 or seats == 4
        return count[0]

    assert looks(2000) <= looks(200)


def test_expected_output_length_follows_what_was_seen():
    lengths = OutputLengths(quantile=0.9, memory=10)
    assert lengths.expect(0) == 128
    for value in range(1, 11):
        lengths.add(value)
    assert lengths.expect(0) == 9
    assert lengths.expect(9) == 1
    assert lengths.expect(50) == 16, "longer than anything seen: some more, not nothing"
    for _ in range(10):
        lengths.add(3)
    assert lengths.expect(0) == 3, "only the recent ones count"
