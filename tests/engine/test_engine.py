"""The threaded engine: doors, streams, aborts, faults, health. Text is made of one character per token."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from itertools import pairwise

import pytest
from waiting import wait_until

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.errors import (
    ContextOverflowError,
    DeviceLostError,
    EngineClosedError,
    RequestAbortedError,
    RequestFailedError,
    RequestRejectedError,
)
from paged_backend.sampling_params import RequestOutputKind, SamplingParams
from paged_backend.testing import StepGate, scripted_core
from paged_backend.toolcalls import prepare_chat

VOCAB = 128
EOS = 3


class CharTokenizer:
    """Token id = code point; ids below 32 are special."""

    special_ids = frozenset(range(32))

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i < 32))

    def token_bytes(self, index):
        return self.decode([index], skip_special_tokens=False).encode()

    def overlaps_special(self, text):
        return any(ord(c) < 32 for c in text)


def following(context):
    """a -> b -> c ... z -> a; anything else counts up from 'a'."""
    last = context[-1]
    return last + 1 if ord("a") <= last < ord("z") else ord("a")


def open_engine(next_token=following, tokenizer=None, **options):
    core = scripted_core(next_token=next_token, vocab_size=VOCAB, **{"num_blocks": 200, **options})
    return Engine(core, tokenizer or CharTokenizer(), EngineConfig("scripted"), eos_token_ids=[EOS])


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def engine(request):
    """Its runner computes a step when it is given one, or after it was given the next one too."""
    with open_engine(ahead=request.param) as engine:
        yield engine
        wait_until(lambda: not engine._core.has_work)
        assert engine.stats().kv_blocks_used == 0
        assert engine.health == "ok"


GREEDY = SamplingParams(temperature=0, max_tokens=5)


def test_text_comes_out_of_text(engine):
    output = engine.submit("xab", GREEDY).result(20)
    assert output.outputs[0].text == "cdefg"
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt == "xab"
    assert output.finished


def test_a_lost_device_ends_the_engine_and_tells_everybody(caplog):
    engine = open_engine(ahead=True)

    def lost(works):
        raise DeviceLostError("the GPU does not answer any more")

    gate = StepGate(engine._core.runner)
    handles = [engine.submit("a", GREEDY) for _ in range(3)]
    engine._core.runner.before_run = lost
    gate.open()
    for handle in handles:
        with pytest.raises(EngineClosedError, match="does not answer"):
            handle.result(20)
    wait_until(lambda: engine.health == "dead")  # what a supervisor restarts
    with pytest.raises(EngineClosedError):
        engine.submit("a", GREEDY)


def test_token_ids_and_dicts_are_prompts_too(engine):
    for prompt in (
        [97],
        {"prompt": "a"},
        {"prompt_token_ids": [97]},
        {"prompt": "shown", "prompt_token_ids": [97]},
    ):
        assert engine.submit(prompt, GREEDY).result(20).outputs[0].text == "bcdef"


def test_streams_grow_and_end_with_the_whole(engine):
    seen = list(engine.submit("a", SamplingParams(temperature=0, max_tokens=30)))
    texts = [o.outputs[0].text for o in seen]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert len(texts[-1]) == 30
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]


def test_deltas_join_to_the_whole_and_carry_tokens_with_their_text(engine):
    params = SamplingParams(temperature=0, max_tokens=30, output_kind=RequestOutputKind.DELTA, logprobs=0)
    seen = list(engine.submit("a", params))
    whole = engine.submit("a", SamplingParams(temperature=0, max_tokens=30)).result(20)
    assert "".join(o.outputs[0].text for o in seen) == whole.outputs[0].text
    assert [t for o in seen for t in o.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in seen)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_token_that_comes_while_the_reader_looks_makes_no_empty_piece(engine, asynchronous):
    params = SamplingParams(temperature=0, max_tokens=5, output_kind=RequestOutputKind.DELTA)
    with StepGate(engine._core.runner) as gate:
        handle = engine.submit("a", params)
        outputs = handle._outputs

        def look_slowly(done):
            gate.allow()
            time.sleep(0.03)  # time for that step, and for its token to arrive if it may
            return outputs(done)

        async def arrived():
            return [output async for output in handle]

        handle._outputs = look_slowly
        gate.allow()
        seen = asyncio.run(arrived()) if asynchronous else list(handle)
    assert all(output.outputs[0].token_ids for output in seen)
    assert sum(len(output.outputs[0].token_ids) for output in seen) == 5


def test_final_only_yields_once(engine):
    params = SamplingParams(temperature=0, max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
    seen = list(engine.submit("a", params))
    assert len(seen) == 1
    assert seen[0].finished


def test_async_streams_run_side_by_side(engine):
    async def one(prompt):
        texts = [output.outputs[0].text async for output in engine.generate(prompt, GREEDY)]
        return texts[-1]

    async def main():
        return await asyncio.gather(*(one(c) for c in "abcdefgh"))

    assert asyncio.run(main()) == ["bcdef", "cdefg", "defgh", "efghi", "fghij", "ghijk", "hijkl", "ijklm"]


def test_a_cancelled_task_frees_its_blocks(engine):
    async def main():
        reading = asyncio.Event()

        async def read():
            async for _ in engine.generate("a", SamplingParams(temperature=0, max_tokens=3000)):
                reading.set()

        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with StepGate(engine._core.runner) as gate:
        gate.allow(5)
        asyncio.run(main())
    wait_until(lambda: engine.stats().num_running == 0)
    assert engine.stats().generation_tokens < 20


def test_leaving_an_iteration_aborts_the_request(engine):
    # vllm #54947, #9428
    with StepGate(engine._core.runner) as gate:
        gate.allow(5)
        for _ in engine.submit("a", SamplingParams(temperature=0, max_tokens=3000)):
            break
        gc.collect()
    wait_until(lambda: engine.stats().num_running == 0)
    assert engine.stats().generation_tokens < 20


def test_a_dropped_handle_aborts_the_request(engine):
    with StepGate(engine._core.runner) as gate:
        gate.allow(5)
        handle = engine.submit("a", SamplingParams(temperature=0, max_tokens=3000))
        while handle.num_generated == 0:
            time.sleep(0.002)
        del handle
        gc.collect()
    wait_until(lambda: engine.stats().num_running == 0)
    assert engine.stats().generation_tokens < 20


def test_abort_wakes_the_waiter_and_frees_the_blocks(engine):
    with StepGate(engine._core.runner) as gate:
        gate.allow(5)
        handle = engine.submit("a", SamplingParams(temperature=0, max_tokens=3000))
        threading.Timer(0.05, handle.abort).start()
        with pytest.raises(RequestAbortedError):
            handle.result(20)
    wait_until(lambda: engine.stats().kv_blocks_used == 0)
    handle.abort()  # once more does no harm


def test_abort_before_the_first_step_never_runs(engine):
    with StepGate(engine._core.runner) as gate:
        busy = engine.submit("a", GREEDY)
        gate.wait_until_held()
        handle = engine.submit("b", GREEDY)
        handle.abort()
    busy.result(20)
    assert handle.wait(20).outputs[0].token_ids == []


def test_a_reader_that_is_slow_gets_everything_and_holds_up_nobody(engine):
    with StepGate(engine._core.runner) as gate:
        gate.allow(5)
        handle = engine.submit("a", SamplingParams(temperature=0, max_tokens=500))
        slow = iter(handle)
        first = next(slow)
    assert engine.submit("m", GREEDY).result(20).outputs[0].text == "nopqr"
    wait_until(lambda: handle.finished)
    rest = list(slow)
    assert len(rest) <= 2, "what gathered meanwhile comes in one piece"
    assert len(rest[-1].outputs[0].token_ids) == 500
    assert not first.finished


def test_stop_strings_end_the_text_across_tokens_and_free_the_blocks(engine):
    # vllm #3574, #2577: a stop string over several tokens leaked into the stream
    params = SamplingParams(temperature=0, max_tokens=2000, stop=["hij"])
    seen = [o.outputs[0] for o in engine.submit("a", params)]
    assert seen[-1].text == "bcdefg"
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", "hij")
    assert all("hij".startswith(o.text[6:]) and "h" not in o.text for o in seen)
    assert len(seen[-1].token_ids) == 9, "ids up to the one that completed the stop string"
    wait_until(lambda: engine.stats().num_running == 0)


def test_a_stop_string_ends_only_its_own_sample():
    def two_ways(context):
        return ord("s") if 65 <= context[-1] < 97 else following(context)

    with open_engine(two_ways) as engine:
        params = SamplingParams(n=2, temperature=1.0, seed=0, max_tokens=40, stop=["z"])
        output = engine.submit("a", params).result(20)
        assert output.outputs[0].finish_reason == "stop"
        assert output.finished


def test_end_of_sequence_stops_unless_ignored():
    with open_engine(lambda context: EOS if len(context) == 4 else following(context)) as engine:
        output = engine.submit("ab", SamplingParams(temperature=0, max_tokens=9)).result(20).outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("cd", "stop", None)
        assert output.token_ids[-1] == EOS
        more = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        output = engine.submit("ab", more).result(20).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (9, "length")
        by_id = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[ord("d")])
        output = engine.submit("ab", by_id).result(20).outputs[0]
        assert (output.text, output.stop_reason) == ("c", ord("d"))


def test_output_ends_with_length_at_the_edge_of_the_context():
    with open_engine(max_model_len=20) as engine:
        output = engine.submit("abcdefghij", SamplingParams(temperature=0, max_tokens=100)).result(20)
        assert len(output.outputs[0].token_ids) == 10
        assert output.outputs[0].finish_reason == "length"


def test_bad_input_is_refused_at_the_door_and_the_engine_serves_on(engine):
    # vllm #7632, #7283: an empty prompt killed the engine; PR #16529: ids outside the vocabulary
    bad = [
        ("", GREEDY, "empty"),
        ([], GREEDY, "empty"),
        ([5, VOCAB], GREEDY, "outside the vocabulary"),
        ([-1], GREEDY, "outside the vocabulary"),
        ([1] * 5000, GREEDY, "context window"),
        (3.5, GREEDY, "prompt must be"),
        ({"text": "a"}, GREEDY, "prompt_token_ids"),
        (["a", "b"], GREEDY, "prompt must be"),
        ("a", SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        ("a", SamplingParams(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
        ("a", SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        ("a", SamplingParams(n=65), "max_num_seqs"),
        ("a", SamplingParams(logprobs=VOCAB + 1), "logprobs"),
    ]
    running = engine.submit("a", SamplingParams(temperature=0, max_tokens=200))
    for prompt, params, message in bad:
        with pytest.raises(RequestRejectedError, match=message):
            engine.submit(prompt, params)
    assert running.result(20).outputs[0].finish_reason == "length"
    assert issubclass(ContextOverflowError, ValueError)


def test_if_one_of_many_is_refused_none_is_queued(engine):
    with pytest.raises(RequestRejectedError):
        engine.submit_many(["a", ""], [GREEDY, GREEDY])
    assert engine.stats().prompt_tokens == 0


def test_request_ids_must_be_unique(engine):
    with StepGate(engine._core.runner):
        first = engine.submit("a", GREEDY, "same")
        with pytest.raises(RequestRejectedError, match="already in use"):
            engine.submit("a", GREEDY, "same")
    first.result(20)


def test_a_failing_request_raises_and_the_engine_serves_on(engine):
    def fault(works):
        if any(ord("!") in w.token_ids for w in works):
            raise RuntimeError("kernel fault")

    engine._core.runner.before_run = fault
    bad, good = engine.submit_many(["!", "a"], [GREEDY, GREEDY])
    with pytest.raises(RequestFailedError, match="kernel fault"):
        bad.result(20)
    with pytest.raises(RequestFailedError):
        list(bad)
    assert good.result(20).outputs[0].text == "bcdef"


def test_when_bookkeeping_raises_waiters_get_the_error_and_health_says_degraded():
    # vllm #7633: health said OK after the loop had died; transformers PR #48301: a dead thread hid errors
    with open_engine() as engine:
        original = engine._core.scheduler.schedule
        engine._core.scheduler.schedule = lambda: 1 / 0
        with pytest.raises(RequestFailedError, match="division"):
            engine.submit("a", GREEDY).result(20)
        assert engine.health == "degraded"
        engine._core.scheduler.schedule = original
        assert engine.submit("a", GREEDY).result(20).outputs[0].text == "bcdef"


def test_a_detokenizer_that_raises_fails_its_request_only():
    decode = CharTokenizer.decode

    class Broken(CharTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            if ord("q") in ids:
                raise RuntimeError("cannot decode q")
            return decode(self, ids, skip_special_tokens)

    with open_engine(tokenizer=Broken()) as engine:
        bad = engine.submit("p", SamplingParams(temperature=0, max_tokens=400))
        good = engine.submit("a", GREEDY)
        with pytest.raises(RequestFailedError, match="cannot decode q"):
            bad.result(20)
        assert good.result(20).outputs[0].text == "bcdef"


def test_many_threads_submit_at_once(engine):
    results, threads = {}, []

    def work(i):
        c = chr(ord("a") + i % 20)
        results[i] = engine.submit(c, GREEDY).result(60).outputs[0].text[0] == chr(ord(c) + 1)

    for i in range(40):
        threads.append(threading.Thread(target=work, args=(i,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert all(results.values())


def test_closing_wakes_every_waiter_and_refuses_new_requests():
    engine = open_engine()
    engine._core.runner.before_run = lambda works: time.sleep(0.01)  # 30 s in all: it cannot finish before
    handle = engine.submit("a", SamplingParams(temperature=0, max_tokens=3000))
    errors = []

    def wait():
        try:
            handle.result(30)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(30)
    assert isinstance(errors[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        engine.submit("a", GREEDY)
    assert engine.health == "closed"
    engine.close()


def test_a_result_that_takes_too_long_raises_and_goes_on(engine):
    with StepGate(engine._core.runner):
        handle = engine.submit("a", GREEDY)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
    assert handle.result(20).outputs[0].text == "bcdef"


def test_metrics_and_usage_are_filled(engine):
    output = engine.submit("abcdefghijklmnopqrst", GREEDY).result(20)
    again = engine.submit("abcdefghijklmnopqrst", GREEDY).result(20)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert output.num_cached_tokens == 0
    assert again.num_cached_tokens == 16
    stats = engine.stats()
    assert stats.prompt_tokens == 40
    assert stats.generation_tokens == 10
    assert stats.prefix_cache_hits == 16


def test_seeded_requests_do_not_depend_on_their_batch_mates(engine):
    # vllm #51226, #17524
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20)
    alone = engine.submit("a", params).result(20).outputs[0].token_ids
    others = [SamplingParams(temperature=1.0, max_tokens=20)] * 5
    mixed = engine.submit_many(["b", "c", "d", "e", "f", "a"], [*others, params])
    assert mixed[-1].result(20).outputs[0].token_ids == alone


def test_explicit_options_win_over_the_generation_config_which_wins_over_defaults():
    # vllm #15241; mlx-vlm #1331: temperature=0 given by the caller must stay 0
    core = scripted_core()
    config = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 6}
    with Engine(core, CharTokenizer(), EngineConfig("scripted"), generation_config=config) as engine:
        (request,), _ = engine.model.inputs.prepare("a", SamplingParams(temperature=0, seed=1), None)
        assert (request.params.temperature, request.params.top_k, request.max_tokens) == (0, 7, 6)
        assert request.params.top_p == 1.0


def test_a_listener_that_raises_hurts_nobody(engine):
    with StepGate(engine._core.runner):
        handle = engine.submit("a", GREEDY)
        handle._state.listen(lambda: 1 / 0)
    assert handle.result(20).outputs[0].text == "bcdef"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["loop", "output"])
def test_a_thread_that_dies_wakes_every_waiter_and_health_says_dead(thread):
    # vllm #7633, transformers PR #48301
    engine = open_engine()

    def die(*args):
        raise SystemExit

    if thread == "loop":
        engine._core.step = die
    else:
        engine.model.loop._deliver_one = die
    with pytest.raises(EngineClosedError, match="died"):
        engine.submit("a", GREEDY).result(20)
    wait_until(lambda: engine.health == "dead")
    with pytest.raises(EngineClosedError):
        engine.submit("a", GREEDY)
    engine.close()


def test_a_model_without_a_tokenizer_takes_ids_and_says_so():
    with Engine(scripted_core(), None, EngineConfig("scripted")) as engine:
        refused = [
            lambda: engine.submit("a", GREEDY),
            lambda: engine.submit([5], SamplingParams(max_tokens=1, bad_words=["x"], detokenize=False)),
            lambda: prepare_chat(engine.tokenizer, [{"role": "user", "content": "hi"}], GREEDY),
        ]
        for call in refused:
            with pytest.raises(RequestRejectedError, match="tokenizer"):
                call()
        ids = SamplingParams(temperature=0, max_tokens=5, detokenize=False)
        assert len(engine.submit([5], ids).result(20).outputs[0].token_ids) == 5
