"""The step loop over a scripted model whose output depends on every slot it reads back (see paged_backend.testing)."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from paged_backend import testing
from paged_backend.engine.request import Request
from paged_backend.engine.stats import EngineStats
from paged_backend.errors import ContextOverflowError, RequestFailedError, RequestRejectedError
from paged_backend.runner.sampler import Sampler
from paged_backend.sampling_params import BeamSearch, SamplingParams
from paged_backend.testing import mixing_next_token


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def scripted_core(request):
    """Makes cores whose runner computes a step when it is given one, or after it was given the next one too."""
    return partial(testing.scripted_core, ahead=request.param)


def make(core, name, prompt, max_tokens=8, **kwargs) -> Request:
    stop_ids = kwargs.pop("stop_ids", ())
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0, **kwargs}).resolved()
    core.limits.admit(prompt, params.n)
    request = Request(name, prompt, params, seed=params.seed or 0, stop_ids=stop_ids)
    core.add(request)
    return request


def expect_short_outputs(core):
    """Let admission guess wrongly, so that preemption must cover it."""
    for _ in range(200):
        core.scheduler.lengths.add(1)


def drain(core, limit=5000):
    """Run to the end; {(request id, index): (tokens, finish reason, error)}."""
    results: dict = {}
    while core.has_work:
        limit -= 1
        assert limit
        for update in core.step():
            key = (update.request.request_id, update.request.index)
            tokens, _, _ = results.setdefault(key, ([], None, None))
            if update.sampled is not None:
                tokens.append(update.sampled.token_id)
            results[key] = (tokens, update.finish_reason, update.error)
    assert core.cache.pool.num_free == core.cache.pool.capacity
    core.check()
    return results


def expected(prompt, count, vocab=1000, window=None):
    context, step = list(prompt), mixing_next_token(vocab)
    for _ in range(count):
        context.append(step(context if window is None else context[-window:]))
    return context[len(prompt) :]


def prompts(seed, count, longest=120):
    rnd = random.Random(seed)
    shared = [rnd.randrange(1000) for _ in range(longest)]
    return [
        shared[: rnd.choice([0, 0, 40, longest])]
        + [rnd.randrange(1000) for _ in range(rnd.randint(1, longest))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("num_blocks", "seats", "budget", "prefix"),
    [
        (500, 64, 512, True),
        (500, 64, 512, False),
        (500, 1, 512, True),
        (500, 64, 64, True),
        (24, 64, 64, True),
        (24, 5, 512, False),
    ],
)
def test_output_does_not_depend_on_pool_batch_chunks_or_prefix_cache(
    scripted_core, num_blocks, seats, budget, prefix
):
    # vllm #16832, PR #28787; nano-vllm PR #103; sglang PR #20724: preemption loses or doubles tokens
    core = scripted_core(
        num_blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_caching=prefix,
        max_model_len=370,
    )
    items = prompts(num_blocks + seats, 20)
    expect_short_outputs(core)
    for i, prompt in enumerate(items):
        make(core, str(i), prompt, max_tokens=100)
    results = drain(core)
    if num_blocks == 24 and seats == 64:
        assert core.scheduler.stats.num_preemptions > 0
    for i, prompt in enumerate(items):
        assert results[str(i), 0] == (expected(prompt, 100), "length", None)


@pytest.mark.parametrize("chunk", [7, 31, 32, 33, 100])
def test_a_sliding_window_reads_only_what_it_sees_whatever_the_chunk(scripted_core, chunk):
    # litgpt #2182, executorch PR #20346: a chunk longer than the window overwrote what it still needed
    core = scripted_core(40, window=32, max_num_seqs=4, max_num_batched_tokens=chunk)
    prompt = prompts(1, 1, 100)[0]
    make(core, "a", prompt, max_tokens=96)
    assert drain(core)["a", 0][0] == expected(prompt, 96, window=32)


def test_n_samples_share_the_prompt_and_differ_by_seed(scripted_core):
    # vllm #16449, #7808: n > 1 with a seed gave identical or unrelated samples
    core = scripted_core(200)
    prompt = prompts(2, 1)[0]
    make(core, "n", prompt, max_tokens=20, n=4, temperature=1.0, seed=5)
    core.step()
    assert len(core.scheduler.running) == 4
    assert core.cache.pool.num_used == core.cache.blocks_for(len(prompt))
    results = drain(core)
    assert len({tuple(results["n", i][0]) for i in range(1, 4)}) == 3

    params = SamplingParams(n=4)
    for i in range(1, 4):
        alone = scripted_core(200)
        make(alone, "x", prompt, max_tokens=20, temperature=1.0, seed=params.child_seed(5, i))
        child = drain(alone)["x", 0][0]
        assert child[1:] == results["n", i][0], "sample i is the request with the derived seed"


def test_forked_samples_survive_preemption(scripted_core):
    roomy, tight = (scripted_core(n, max_model_len=330, max_num_batched_tokens=64) for n in (500, 24))
    for core in (roomy, tight):
        expect_short_outputs(core)
        for i, prompt in enumerate(prompts(3, 6, 60)):
            make(core, str(i), prompt, max_tokens=90, n=3, temperature=1.0, seed=i)
    assert drain(tight) == drain(roomy)
    assert tight.scheduler.stats.num_preemptions > 0


def test_samples_that_fill_the_pool_take_blocks_from_each_other(scripted_core):
    # all had the same order, so none could take any: nothing was scheduled for ever
    core = scripted_core(20, max_model_len=200)
    expect_short_outputs(core)
    make(core, "n", [1, 2, 3], max_tokens=150, n=8, temperature=1.0, seed=3)
    make(core, "other", [4, 5], max_tokens=4)
    results = drain(core)
    assert {reason for _, reason, _ in results.values()} == {"length"}
    assert results["other", 0][0] == expected([4, 5], 4)
    assert core.scheduler.stats.num_preemptions > 0


def test_if_nothing_can_be_scheduled_the_youngest_fails_and_nobody_waits_for_ever(scripted_core, caplog):
    core = scripted_core(50)
    make(core, "old", [1, 2, 3], max_tokens=5)
    make(core, "young", [4, 5], max_tokens=5)
    core.step()
    schedule = core.scheduler.schedule
    core.scheduler.schedule = dict
    while not (updates := core.step()) or updates[0].error is None:
        assert core.has_work
    assert isinstance(updates[0].error, RequestFailedError)
    assert updates[0].request.request_id == "young"
    assert "nothing can be scheduled" in caplog.text
    core.scheduler.schedule = schedule
    assert drain(core)["old", 0][1] == "length"


def test_aborting_a_forked_request_frees_all_samples(scripted_core):
    # vllm PR #14512: aborts were not propagated to the children
    core = scripted_core(200)
    make(core, "n", [1, 2, 3], max_tokens=50, n=4, temperature=1.0)
    for _ in range(3):
        core.step()
    core.finish("n")
    assert not core.scheduler.has_work
    assert core.cache.pool.num_free == core.cache.pool.capacity
    assert drain(core) == {}


def test_one_sample_can_be_ended_while_its_siblings_go_on(scripted_core):
    core = scripted_core(200)
    make(core, "n", [1, 2, 3], max_tokens=20, n=3, temperature=1.0)
    core.step()
    assert [r.index for r in core.finish("n", 1)] == [1]
    results = drain(core)
    assert results["n", 0][1] == results["n", 2][1] == "length"


def test_every_stop_id_ends_the_output_and_is_part_of_it(scripted_core):
    # vllm #4180: an eos list was ignored
    prompt = [5, 6, 7]
    tokens = expected(prompt, 12)
    for stop in (tokens[4], tokens[9]):
        core = scripted_core(50)
        make(core, "a", prompt, max_tokens=12, stop_ids=(stop, 999_999))
        got, reason, _ = drain(core)["a", 0]
        assert got == tokens[: tokens.index(stop) + 1]
        assert reason == "stop"


def test_a_step_that_fails_hurts_only_the_request_that_fails_alone(scripted_core):
    # vllm #27194, #23517: one bad request killed the engine
    core = scripted_core(200, vocab_size=10**6, next_token=mixing_next_token(1000))
    items = prompts(4, 5)
    for i, prompt in enumerate(items):
        make(core, str(i), prompt, max_tokens=10)

    def fault(works):
        if any(work.token_ids and 777_777 in work.token_ids for work in works):
            raise RuntimeError("kernel fault")

    core.runner.before_run = fault
    make(core, "bad", [1, 777_777, 2], max_tokens=10)
    results = drain(core)
    _, reason, error = results["bad", 0]
    assert reason == "error"
    assert isinstance(error, RequestFailedError)
    assert isinstance(error.__cause__, RuntimeError)
    assert core.num_failed_steps >= 1
    for i in range(5):
        assert results[str(i), 0][1] == "length"


def test_a_fault_that_does_not_come_back_hurts_nobody(scripted_core):
    core = scripted_core(200)
    items = prompts(5, 5)
    for i, prompt in enumerate(items):
        make(core, str(i), prompt, max_tokens=10)
    faults = iter([True, False, True])

    def fault(works):
        if len(works) > 1 and next(faults, False):
            raise RuntimeError("transient")

    core.runner.before_run = fault
    results = drain(core)
    assert core.num_failed_steps == 2
    for i, prompt in enumerate(items):
        assert results[str(i), 0] == (expected(prompt, 10), "length", None)


def test_a_row_that_cannot_be_sampled_fails_alone(scripted_core):
    # vllm PR #16529: an all-masked row crashed the engine
    core = scripted_core(200)
    make(core, "good", [1, 2, 3], max_tokens=5)
    make(core, "bad", [4, 5, 6], max_tokens=5)
    original = core.runner._result

    def result(work):
        out = original(work)
        if work.token_ids[-1] == 6:
            out.sampled[:] = [ValueError("every token is masked")]
        return out

    core.runner._result = result
    results = drain(core)
    assert results["bad", 0][1] == "error"
    assert results["good", 0][1] == "length"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("place", ["stop_criteria", "logits_processors", "beams"])
def test_a_callback_may_raise_anything_and_only_its_request_fails(scripted_core, kind, place):
    core = scripted_core(200)

    def bad(*args):
        raise kind("from a callback")

    def on_another_thread(function):  # Ctrl-C in the main thread is the user's, and goes through
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    options = {place: (bad,)} if place != "beams" else {"stop_criteria": (bad,), "beam_search": BeamSearch(2)}
    if place == "logits_processors":
        sampler, result = Sampler(), core.runner._result

        def sample(sequence):
            out = result(sequence)
            rows = [row for row in sequence.rows if row.params.logits_processors]
            out.sampled[: len(rows)] = sampler.sample(np.zeros((len(rows), 1000), np.float32), rows)
            return out

        core.runner._result = sample
    make(core, "bad", [1, 2, 3], **options)
    make(core, "good", [4, 5], max_tokens=5)
    results = on_another_thread(lambda: drain(core))
    assert results["bad", 0][1] == "error"
    assert isinstance(results["bad", 0][2], RequestFailedError)
    assert kind.__name__ in str(results["bad", 0][2])
    assert results["good", 0] == (expected([4, 5], 5), "length", None)


def test_a_step_may_raise_anything_and_only_its_culprit_fails(scripted_core):
    core = scripted_core(200)

    def fault(works):
        if any(7 in work.token_ids for work in works):
            raise SystemExit("from a module's hook")

    core.runner.before_run = fault
    make(core, "bad", [7], max_tokens=5)
    make(core, "good", [4, 5], max_tokens=2)
    results = drain(core)
    assert results["bad", 0][1] == "error"
    assert results["good", 0] == (expected([4, 5], 2), "length", None)


def test_failed_steps_publish_nothing_to_the_prefix_cache(scripted_core):
    core = scripted_core(200)

    def fault(works):
        raise RuntimeError("down")

    core.runner.before_run = fault
    make(core, "a", list(range(40)))
    assert drain(core)["a", 0][1] == "error"
    assert core.cache.prefixes.num_cached_blocks == 0


def test_blocks_computed_before_a_failure_stay_cached(scripted_core):
    core = scripted_core(200, max_num_seqs=8, max_num_batched_tokens=64)
    prompt = list(range(200))
    make(core, "a", prompt)
    core.step()
    core.runner.before_run = lambda works: (_ for _ in ()).throw(RuntimeError("down"))
    assert drain(core)["a", 0][1] == "error"
    core.runner.before_run = lambda works: None
    again = make(core, "b", prompt)
    assert drain(core)["b", 0][1] == "length"
    assert again.num_cached_tokens == 64


def test_copy_on_write_survives_a_failing_step(scripted_core):
    core = scripted_core(200)
    fails = iter([True])
    original = core.runner.copy_blocks

    def copy(pairs):
        if next(fails, False):
            raise RuntimeError("copy failed")
        original(pairs)

    core.runner.copy_blocks = copy
    make(core, "n", list(range(5)), max_tokens=10, n=3, temperature=1.0)
    make(core, "other", [9, 9], max_tokens=10)
    results = drain(core)
    assert results["other", 0] == (expected([9, 9], 10), "length", None)


def test_prompt_logprobs_are_complete_under_chunks_hits_and_preemption(scripted_core):
    # vllm #8268, #5344: crash or stale values with a prefix cache
    for blocks, budget in ((200, 512), (200, 16), (22, 32)):
        core = scripted_core(blocks, max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=300)
        expect_short_outputs(core)
        items = prompts(6, 6, 80)
        for turn in range(2):
            for i, prompt in enumerate(items):
                make(core, f"{turn}/{i}", prompt, max_tokens=60, prompt_logprobs=0)
        scores: dict[str, list[int]] = {}
        while core.has_work:
            for update in core.step():
                scores.setdefault(update.request.request_id, []).extend(
                    s.token_id for s in update.prompt_logprobs
                )
        for turn in range(2):
            for i, prompt in enumerate(items):
                assert scores[f"{turn}/{i}"] == prompt[1:]


def test_a_request_that_could_never_run_is_refused_while_others_go_on(scripted_core):
    # vllm #27073, #39734, #45388: waits forever and blocks the queue
    core = scripted_core(9, max_model_len=1000)
    make(core, "fine", [1, 2, 3])
    with pytest.raises(ContextOverflowError, match="KV pool"):
        make(core, "x", [1] * 130)
    with pytest.raises(ContextOverflowError, match="context window"):
        make(core, "x", [1] * 1000)
    with pytest.raises(RequestRejectedError, match="empty"):
        make(core, "x", [])
    with pytest.raises(RequestRejectedError, match="vocabulary"):
        make(core, "x", [1, 1000])
    with pytest.raises(RequestRejectedError, match="vocabulary"):
        make(core, "x", [-1])
    with pytest.raises(RequestRejectedError, match="max_num_seqs"):
        make(core, "x", [1], n=65, temperature=1.0)
    assert drain(core)["fine", 0][1] == "length"


@pytest.mark.parametrize("seed", range(15))
def test_random_aborts_in_any_state_leak_nothing_and_disturb_nobody(scripted_core, seed):
    # vllm #9428, #54947; sglang #18701: abort in waiting, chunk, decode, preempted, forked
    rnd = random.Random(seed)
    core = scripted_core(rnd.randint(26, 60), max_num_batched_tokens=64, max_num_seqs=20, max_model_len=380)
    expect_short_outputs(core)
    items = {}
    for i, prompt in enumerate(prompts(seed, 25)):
        n = rnd.choice([1, 1, 3])
        make(core, str(i), prompt, max_tokens=100, n=n, temperature=1.0 if n > 1 else 0)
        items[str(i)] = (prompt, n)
    aborted, results = set(), {}
    while core.has_work:
        for update in core.step():
            results.setdefault((update.request.request_id, update.request.index), []).append(
                update.sampled.token_id
            )
        if rnd.random() < 0.05:
            victim = rnd.choice(list(items))
            aborted.add(victim)
            core.finish(victim)
            core.check()
    assert core.cache.pool.num_free == core.cache.pool.capacity
    for name, (prompt, n) in items.items():
        if name not in aborted and n == 1:
            assert results[name, 0] == expected(prompt, 100)


def test_trim_gives_back_every_unused_block(scripted_core):
    core = scripted_core(60)
    prompt = list(range(100))
    make(core, "a", prompt)
    drain(core)
    assert core.cache.prefixes.num_cached_blocks > 0
    committed = core.cache.pool.num_committed
    assert committed >= 7
    assert EngineStats.of(core, 0, 0, 1000, "ok").kv_committed_bytes == committed * 1000
    assert core.trim() == committed
    assert core.cache.pool.num_committed == 0
    make(core, "b", prompt)
    assert drain(core)["b", 0][0] == expected(prompt, 8)


def test_memory_that_a_runner_keeps_stays_committed(scripted_core, monkeypatch):
    core = scripted_core(60)
    make(core, "a", list(range(100)))
    drain(core)
    committed = core.cache.pool.num_committed
    monkeypatch.setattr(core.runner, "give_back", lambda blocks: False)
    assert core.trim() == 0
    assert core.cache.pool.num_committed == committed


def test_a_trim_gives_back_as_many_blocks_as_are_wanted_and_the_coldest_prefixes(scripted_core):
    core = scripted_core(60, block_size=4)
    for number in range(3):
        make(core, f"{number}", [number] * 40)
        drain(core)
    committed, cached = core.cache.pool.num_committed, core.cache.prefixes.num_cached_blocks
    assert core.trim(7) == 7
    assert core.cache.pool.num_committed == committed - 7
    assert cached - 7 <= core.cache.prefixes.num_cached_blocks < cached
    assert core.trim(1000) == committed - 7
    make(core, "again", [2] * 40)
    assert drain(core)["again", 0][0] == expected([2] * 40, 8)


def test_after_a_reset_nobody_hits_what_was_computed_before_or_from_it(scripted_core):
    # what ran while the weights were replaced went on publishing its blocks
    core = scripted_core(60, max_num_seqs=2)
    prompt = list(range(100, 148))
    old = make(core, "old", prompt, max_tokens=40)
    core.step()
    core.step()
    make(core, "other", [1, 2], max_tokens=40)
    waits = make(core, "waits", [*prompt, 5], max_tokens=3)
    core.step()
    assert waits.num_cached_tokens is None
    core.reset_prefixes()
    core.check()
    assert core.cache.prefixes.num_cached_blocks == 0
    while not waits.num_computed:
        core.step()
    assert waits.num_cached_tokens == 0
    assert old.num_output_tokens == 40
    late = make(core, "late", [*old.token_ids[:80], 6], max_tokens=3)
    results = drain(core)
    assert late.num_cached_tokens == 48, "of the new blocks alone"
    assert results["late", 0][0] == expected([*old.token_ids[:80], 6], 3)
    assert old.token_ids == prompt + expected(prompt, 40)


def test_waste_counts_empty_slots_of_allocated_blocks(scripted_core):
    core = scripted_core(60, 16)
    make(core, "a", list(range(20)), max_tokens=2)
    core.step()
    assert core.usage.last.blocks == 2
    tokens = 21 if core.runner.runs_ahead else 20  # one more is on its way
    assert core.usage.last.live_tokens == tokens
    assert core.usage.waste == pytest.approx(1 - tokens / 32)
    drain(core)


def test_scripted_runner_notices_a_slot_that_was_never_written(scripted_core):
    core = scripted_core(num_blocks=4)
    make(core, "a", list(range(20)), max_tokens=5)
    core.step()
    core.runner.memory[1][3] = -1
    assert drain(core)["a", 0][1] == "error"


@pytest.mark.parametrize("seed", range(15))
def test_faults_at_any_time_change_no_token_and_leak_nothing(scripted_core, seed):
    # a step fails, its launch fails, its copies fail: with preemption, forks, windows and stops going on
    rnd = random.Random(seed)
    window = rnd.choice([None, None, 48])
    core = scripted_core(
        rnd.randint(28, 60), max_num_batched_tokens=64, max_num_seqs=16, max_model_len=240, window=window
    )
    expect_short_outputs(core)
    runner = core.runner

    def sometimes(works):
        if len(works) > 1 and rnd.random() < 0.15:
            raise RuntimeError("transient")

    launch, copy, seen = runner.launch, runner.copy_blocks, set()

    def launch_or_not(works):
        if len(works) > 1 and rnd.random() < 0.1:
            raise RuntimeError("out of memory")
        return launch(works)

    def copy_or_not(pairs):
        new = not seen.issuperset(pairs)
        seen.update(pairs)
        if new and rnd.random() < 0.3:
            raise RuntimeError("copy failed once")
        copy(pairs)

    runner.before_run, runner.launch, runner.copy_blocks = sometimes, launch_or_not, copy_or_not
    items = prompts(seed, 18, 60)
    for i, prompt in enumerate(items):
        n = rnd.choice([1, 1, 2])
        stop = expected(prompt, 60, window=window)[rnd.randrange(60)]
        make(core, str(i), prompt, 60, n=n, temperature=1.0 if n > 1 else 0, stop_ids=(stop,))
    results = drain(core)
    assert core.num_failed_steps > 5
    for (name, index), (tokens, reason, error) in results.items():
        assert error is None
        if index == 0:
            assert tokens == expected(items[int(name)], len(tokens), window=window)
            assert reason == "stop" or len(tokens) == 60


def test_the_next_step_is_launched_before_this_one_is_done_wherever_it_is_foreseeable():
    core = testing.scripted_core(200, ahead=True)
    launched, landed = [0], []
    launch = core.runner.launch

    def counted(works):
        launched[0] += 1
        return launch(works)

    core.runner.launch = counted
    core.runner.before_run = lambda works: landed.append(launched[0])
    make(core, "a", [1, 2, 3], max_tokens=6)
    make(core, "b", [4, 5], max_tokens=4)
    results = drain(core)
    assert landed == [2, 3, 4, 5, 6, 6]  # none after the last, whose end is known beforehand
    assert results["a", 0][0] == expected([1, 2, 3], 6)

    for options in (
        {"repetition_penalty": 1.2},
        {"logprobs": 1},
        {"n": 2, "temperature": 1.0},
        {"prompt_logprobs": 1},
    ):
        launched[0], landed[:] = 0, []
        make(core, "c", [1, 2, 3], max_tokens=3, **options)
        drain(core)
        assert landed[0] == 1, options


def test_a_request_that_ends_early_costs_one_row_that_nobody_sees():
    core = testing.scripted_core(50, ahead=True)
    prompt = [5, 6, 7]
    tokens = expected(prompt, 12)
    make(core, "a", prompt, max_tokens=12, stop_ids=(tokens[4],))
    assert drain(core) == {("a", 0): (tokens[:5], "stop", None)}
    assert core.runner.num_runs == 6
    again = make(core, "b", prompt + tokens[:5] + [9] * 12, max_tokens=1)
    drain(core)
    assert again.num_cached_tokens == 0  # what was computed too far was not published
