"""Who keeps an engine open, and what ends with it: leases, collectors, races with the end, forks, dead threads."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest
from waiting import wait_until

import paged_backend.engine.registry as registry
from paged_backend import LLM, SamplingParams, get_engine
from paged_backend.adapters.common import EngineUses
from paged_backend.engine.engine import Engine
from paged_backend.engine.stream import RequestState
from paged_backend.errors import EngineClosedError, ModelLoadError, RequestFailedError, RequestRejectedError
from paged_backend.testing import StepGate, reply_engine

OPTIONS = {"kernels": "reference", "num_blocks": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def ended(engine) -> bool:
    """Whether the engine's threads have gone and its memory with them."""
    return not hasattr(engine._core if isinstance(engine, Engine) else engine, "runner")


# --- leases ------------------------------------------------------------------------------------------------------


def test_each_caller_has_a_use_of_its_own_that_is_closed_once(tiny_model):
    mine, theirs = get_engine(tiny_model, **OPTIONS), get_engine(tiny_model, **OPTIONS)
    assert mine is not theirs
    assert mine.model is theirs.model
    for _ in range(3):
        mine.close()
    assert (mine.health, theirs.health) == ("closed", "ok")
    with pytest.raises(EngineClosedError):
        mine.submit([5], GREEDY)
    with pytest.raises(EngineClosedError):
        mine.check()
    assert theirs.submit([5], GREEDY).result(30).finished
    theirs.close()
    assert ended(theirs)


def test_a_dropped_engine_is_closed_by_the_collector(tiny_model):
    engine = get_engine(tiny_model, **OPTIONS)
    core = engine._core
    engine.submit([5], GREEDY).result(30)
    del engine
    wait_until(lambda: ended(core))
    with get_engine(
        tiny_model, **{**OPTIONS, "num_blocks": 32}
    ) as again:  # other options are no contradiction now
        assert again.stats().kv_blocks_total == 31


@pytest.mark.parametrize("share", [True, False])
def test_a_dropped_llm_gives_its_memory_back(tiny_model, share):
    llm = LLM(tiny_model, share=share, **OPTIONS)
    llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    runner = weakref.ref(llm.engine._core.runner)
    del llm
    wait_until(lambda: runner() is None)


def test_a_request_that_runs_keeps_its_engine_open_and_a_finished_one_does_not():
    engine = reply_engine(lambda prompt: "hello")
    core = engine._core
    with StepGate(core.runner):
        handle = engine.submit(CHAT, GREEDY)
        del engine
        gc.collect()
    assert handle.result(30).finished
    wait_until(lambda: ended(core))
    assert handle.result(0).finished


def test_the_collector_may_find_an_engine_in_a_thread_that_holds_any_lock():
    """An object in a cycle whose end gives up an engine, found while the registry and the loop hold their locks."""
    engine = reply_engine(lambda prompt: "hello")
    other = Engine.of(engine.model)
    handle = engine.submit(CHAT, SamplingParams(max_tokens=300))
    core, loop = engine._core, engine.model.loop
    cycle = [engine, handle]
    cycle.append(cycle)
    gc.disable()
    try:
        del engine, handle, cycle
        with registry._registry._lock, loop._lock:
            gc.collect()
    finally:
        gc.enable()
    wait_until(lambda: loop.count_users() == 1 and not core.has_work)
    other.close()
    assert ended(core)


def test_a_paged_model_in_a_cycle_that_is_found_while_an_engine_is_built(tiny_model, monkeypatch):
    dropped = get_engine(tiny_model, **OPTIONS)
    core = dropped._core
    cycle = [dropped]
    cycle.append(cycle)
    build = registry.build_engine

    def collecting(config):
        gc.collect()
        return build(config)

    monkeypatch.setattr(registry, "build_engine", collecting)
    gc.disable()
    try:
        del dropped, cycle
        opened: Future[Engine] = Future()
        options = {**OPTIONS, "dtype": "bfloat16"}
        threading.Thread(
            target=lambda: opened.set_result(get_engine(tiny_model, **options)), daemon=True
        ).start()
        opened.result(60).close()
    finally:
        gc.enable()
    wait_until(lambda: ended(core))


def test_an_idle_engine_is_taken_over_and_makes_room_for_other_options(tiny_model):
    uses = EngineUses(OPTIONS)
    core = uses.get(tiny_model)._core
    del uses
    gc.collect()
    assert not ended(core), "its weights are kept for the next one"
    with get_engine(tiny_model, **OPTIONS) as engine:
        assert engine._core is core
    assert ended(core), "whoever has taken it over has closed it"

    uses = EngineUses(OPTIONS)
    core = uses.get(tiny_model)._core
    del uses
    gc.collect()
    with get_engine(tiny_model, **{**OPTIONS, "num_blocks": 32}) as engine:
        assert ended(core)
        assert engine.stats().kv_blocks_total == 31


def test_a_user_of_an_engine_beside_an_idle_use_is_not_robbed(tiny_model):
    uses = EngineUses(OPTIONS)
    uses.get(tiny_model)
    with get_engine(tiny_model, **OPTIONS) as engine:
        del uses
        gc.collect()
        with pytest.raises(ValueError, match="num_blocks=64"):
            get_engine(tiny_model, kernels="reference", num_blocks=32)
        assert engine.submit([5], GREEDY).result(30).finished


# --- what is one engine ------------------------------------------------------------------------------------------


def test_a_model_is_known_by_its_files_and_not_by_its_spelling(tiny_model, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tiny_model)
    with get_engine(tiny_model, **OPTIONS) as one, get_engine(str(link), **OPTIONS) as two:
        assert one.model is two.model


def test_the_demo_is_its_file():
    from paged_backend.checkpoints.gguf import demo_path
    from paged_backend.config import EngineConfig
    from paged_backend.engine.identity import weights_key

    def key(model, **options):
        return weights_key(EngineConfig(model, **options), {})

    assert key("demo") == key(str(demo_path()))
    assert key("demo") != key("demo", dtype="float32"), "auto keeps the blocks of the file"
    assert key("demo", quantization="int8") == key("demo", quantization="int8", dtype="float32")
    assert key("demo", kernels="reference") == key("demo", kernels="reference", dtype="float32")
    assert key("demo") != key("demo", dtype="bfloat16")
    assert key("demo") != key("demo", kernels="reference")


def test_files_that_were_written_anew_are_another_model(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    with get_engine(str(folder), **OPTIONS) as before:
        weights = next(folder.glob("*.safetensors"))
        os.utime(weights, ns=(1, 1))
        with get_engine(str(folder), **OPTIONS) as after:
            assert before.model is not after.model


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"max_num_seqs": 256},
        {"max_model_len": None},
        {"kv_cache_dtype": "auto"},
        {"seed": None},
        {"num_blocks": None},
    ],
)
def test_a_default_that_is_named_is_honoured_or_refused(tiny_model, options):
    other = {
        "enable_prefix_caching": False, "max_num_seqs": 2, "max_model_len": 64, "kv_cache_dtype": "bfloat16", "seed": 3,
        "num_blocks": 64,
    }  # fmt: skip
    with get_engine(tiny_model, kernels="reference", **other):
        with pytest.raises(ValueError, match=f"already open in this process with {next(iter(options))}="):
            get_engine(tiny_model, kernels="reference", **options)
        with get_engine(tiny_model, kernels="reference"):
            pass


def test_naming_what_is_so_anyway_is_no_contradiction(tiny_model):
    with get_engine(tiny_model, **OPTIONS) as engine:
        same = {
            "max_num_seqs": 256, "enable_prefix_caching": True, "kv_cache_dtype": "float32", "tokenizer": tiny_model,
            "max_model_len": engine.model.effective["max_model_len"], "max_num_batched_tokens": 512, "dtype": "float32",
        }  # fmt: skip
        with get_engine(tiny_model, **OPTIONS, **same) as again:
            assert again.model is engine.model


# --- opening -----------------------------------------------------------------------------------------------------


def test_a_model_that_loads_keeps_nobody_from_another_one(tiny_model, monkeypatch):
    build, loading, go = registry.build_engine, threading.Event(), threading.Event()

    def slow(config):
        if config.dtype == "bfloat16":
            loading.set()
            assert go.wait(60)
        return build(config)

    monkeypatch.setattr(registry, "build_engine", slow)
    opened = []
    threads = [
        threading.Thread(
            target=lambda: opened.append(get_engine(tiny_model, kernels="reference", dtype="bfloat16"))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert loading.wait(60)
    get_engine(tiny_model, **OPTIONS).close()
    assert not opened
    go.set()
    for thread in threads:
        thread.join(60)
    assert len({id(engine.model) for engine in opened}) == 1
    for engine in opened:
        engine.close()


def test_after_a_load_that_failed_the_next_one_tries(tiny_model, monkeypatch):
    build, started, go = registry.build_engine, threading.Event(), threading.Event()
    results = []

    def failing(config):
        if not started.is_set():
            started.set()
            assert go.wait(60)
            raise ModelLoadError("the disk is not there yet")
        return build(config)

    def user():
        try:
            results.append(get_engine(tiny_model, **OPTIONS))
        except ModelLoadError as error:
            results.append(error)

    monkeypatch.setattr(registry, "build_engine", failing)
    threads = [threading.Thread(target=user) for _ in range(4)]
    threads[0].start()
    assert started.wait(60)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    engines = [result for result in results if isinstance(result, Engine)]
    assert (len(results), len(engines)) == (4, 3)
    assert len({id(engine.model) for engine in engines}) == 1
    for engine in engines:
        engine.close()


def test_an_engine_that_cannot_start_leaves_no_thread_and_no_memory():
    before = {thread.ident for thread in threading.enumerate()}
    opened = reply_engine(lambda prompt: "hello")
    core, config = opened._core, opened.config
    opened.close()
    with pytest.raises(TypeError):
        Engine(core, opened.tokenizer, config, eos_token_ids=5)  # type: ignore[arg-type]
    assert {thread.ident for thread in threading.enumerate()} <= before


# --- races with the end ------------------------------------------------------------------------------------------


def test_a_prompt_that_is_encoded_while_the_engine_is_closed_is_refused(monkeypatch):
    engine = reply_engine(lambda prompt: "hello")
    prepare, inside, go = engine.model.inputs.prepare, threading.Event(), threading.Event()

    def slow(*args):
        made = prepare(*args)
        inside.set()
        assert go.wait(30)
        return made

    monkeypatch.setattr(engine.model.inputs, "prepare", slow)
    told: Future[object] = Future()

    def user():
        try:
            told.set_result(engine.submit(CHAT, GREEDY).result(30))
        except Exception as error:
            told.set_exception(error)

    threading.Thread(target=user, daemon=True).start()
    assert inside.wait(30)
    engine.shutdown()
    go.set()
    with pytest.raises(EngineClosedError):
        told.result(30)


def test_calls_and_requests_that_race_the_end_all_come_back():
    for _ in range(20):
        engine = reply_engine(lambda prompt: "hello " * 50)
        outcomes: list[str] = []

        def user(engine=engine, outcomes=outcomes):
            try:
                while True:
                    engine.check()
                    engine.submit(CHAT, GREEDY).result(30)
            except EngineClosedError:
                outcomes.append("closed")

        threads = [threading.Thread(target=user, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(30)
        assert outcomes == ["closed"] * 4


# --- by identity, not by name ------------------------------------------------------------------------------------


def test_a_retry_under_the_same_id_is_another_request(monkeypatch):
    with reply_engine(lambda prompt: "hello world " * 200) as engine:
        apply, failed = RequestState.apply, []

        def once(state, update):
            if not failed:
                failed.append(state)
                raise UnicodeError("a bad token")
            return apply(state, update)

        monkeypatch.setattr(RequestState, "apply", once)
        with StepGate(engine._core.runner) as gate:
            first = engine.submit(CHAT, SamplingParams(max_tokens=30, temperature=0), request_id="x")
            gate.allow()
            with pytest.raises(RequestFailedError, match="bad token"):
                first.result(30)
            # the loop is within a step: the first one is still to be taken out
            again = engine.submit(CHAT, GREEDY, request_id="x")
        assert again.result(30).outputs[0].finish_reason == "length"
        first.abort()
        wait_until(lambda: not engine._core.has_work)


def test_an_old_handle_aborts_its_own_request_only():
    with reply_engine(lambda prompt: "hello world " * 200) as engine:
        long = SamplingParams(max_tokens=100, temperature=0)
        first = engine.submit(CHAT, GREEDY, request_id="x")
        first.result(30)
        with StepGate(engine._core.runner):
            second = engine.submit(CHAT, long, request_id="x")
            first.abort()
            del first
            gc.collect()
            with pytest.raises(RequestRejectedError, match="already in use"):
                engine.submit(CHAT, GREEDY, request_id="x")
        assert second.result(30).outputs[0].finish_reason in ("length", "stop")


def test_ids_are_a_user_s_own():
    with reply_engine(lambda prompt: "hello world " * 200) as mine, Engine.of(mine.model) as theirs:
        with StepGate(mine._core.runner):
            handles = [engine.submit(CHAT, GREEDY, request_id="0") for engine in (mine, theirs)]
            theirs.abort("0")
        assert handles[0].result(30).finished
        assert handles[1].wait(30).outputs[0].finish_reason == "abort"


def test_handles_dropped_by_the_collector_at_any_moment_are_all_aborted():
    with reply_engine(lambda prompt: "hello world " * 2000, num_blocks=3000) as engine:
        for _ in range(5):
            handle = engine.submit(CHAT, SamplingParams(max_tokens=3000, temperature=0))
            cycle = [handle]
            cycle.append(cycle)
            del handle, cycle
            engine.stats()
            gc.collect()
        wait_until(lambda: not engine._core.has_work)
        assert engine.stats().kv_blocks_used == 0
        assert not engine._lease.requests


# --- death, exit, fork -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["loop", "output"])
def test_an_engine_that_has_died_is_replaced_and_its_memory_is_free(tiny_model, thread):
    def die(*args):
        raise SystemExit

    engine = get_engine(tiny_model, **OPTIONS)
    runner = weakref.ref(engine._core.runner)
    if thread == "loop":
        engine._core.step = die
    else:
        engine.model.loop._deliver_one = die
    with pytest.raises(EngineClosedError, match="died"):
        engine.submit([5], GREEDY).result(30)
    assert engine.health == "dead"
    wait_until(lambda: runner() is None)  # though somebody still holds the engine
    for ending in (engine.model.loop._loop_thread, engine.model.loop._output_thread):
        ending.join(30)
        assert not ending.is_alive()
    with get_engine(tiny_model, **OPTIONS) as again:
        assert again.submit([5], GREEDY).result(30).finished
    engine.close()
    assert engine.health == "closed"


EXIT = """
from paged_backend import LLM, SamplingParams, get_engine
params = SamplingParams(max_tokens=400, ignore_eos=True)
class Last:
    def __del__(self):
        self.handle.abort(); self.engine.close()
last = Last()
last.engine = get_engine({model!r}, kernels="reference", num_blocks=64, share={share})
last.handle = last.engine.submit([5, 6], params)
next(iter(get_engine({model!r}, kernels="reference", share={share}).submit([5, 6], params)))
"""


@pytest.mark.parametrize("share", [True, False])
def test_an_interpreter_that_exits_with_engines_and_requests_says_nothing(tiny_model, share):
    code = EXIT.format(model=tiny_model, share=share)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
import os, sys
from paged_backend import SamplingParams, get_engine
from paged_backend.errors import EngineClosedError
options = dict(kernels="reference", num_blocks=64)
params = SamplingParams(max_tokens=4, temperature=0)
engine = get_engine({model!r}, **options)
want = engine.submit([5, 6], params).result(60).outputs[0].token_ids
child = os.fork()
if not child:
    try:
        engine.submit([5, 6], params)
    except EngineClosedError:
        pass
    else:
        os._exit(1)
    engine.close()
    del engine
    with get_engine({model!r}, **options) as own:
        os._exit(0 if own.submit([5, 6], params).result(60).outputs[0].token_ids == want else 2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert engine.submit([5, 6], params).result(60).outputs[0].token_ids == want
"""


def test_the_child_of_a_fork_opens_an_engine_of_its_own(tiny_model):
    code = FORK.format(model=tiny_model)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_tokens_that_come_before_submit_returns_are_not_lost(monkeypatch):
    engine = reply_engine(lambda prompt: "one two three four five")
    with engine:
        expected = engine.submit(CHAT, SamplingParams(temperature=0, max_tokens=40)).result(20).outputs[0]
        loop = engine.model.loop

        class Inbox:
            """The thread that submits is held up, once the loop knows of its request, until there are tokens."""

            def __init__(self, inbox):
                self.inbox = inbox

            def put(self, action):
                before = loop.core.num_steps
                self.inbox.put(action)
                if threading.current_thread() is threading.main_thread():
                    wait_until(lambda: loop.core.num_steps >= before + 3 and loop._outbox.empty())

            def __getattr__(self, name):
                return getattr(self.inbox, name)

        monkeypatch.setattr(loop, "_inbox", Inbox(loop._inbox))
        loop._inbox.inbox.put(lambda: None)  # the loop waits at the bare queue: let it look again
        found = engine.submit(CHAT, SamplingParams(temperature=0, max_tokens=40)).wait(20).outputs[0]
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        monkeypatch.undo()
