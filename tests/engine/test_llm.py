"""LLM and the registry, from a model folder on disk to text."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from paged_backend import LLM, SamplingParams, get_engine
from paged_backend.errors import BatchError, EngineClosedError, ModelLoadError, RequestRejectedError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"kernels": "reference", "num_blocks": 64}


@pytest.fixture
def llm(tiny_model):
    with LLM(tiny_model, **OPTIONS) as llm:
        yield llm
        llm.engine.check()
        assert llm.engine.stats().kv_blocks_used == 0


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["the fox", "a dog " * 9, "x", "jumps over"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == alone


def test_each_prompt_may_have_its_own_params(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 9]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_a_flat_list_of_ids_is_one_prompt(llm):
    assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)) == 1
    assert len(llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False)) == 2
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_chat_writes_begin_of_sequence_exactly_once(llm):
    # vllm PR #27515, #16976: double BOS after the chat template
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<s>[user] hi\n[assistant] "
    assert output.prompt_token_ids.count(1) == 1


def test_several_conversations_run_at_once(llm):
    conversations = [[{"role": "user", "content": c}] for c in "abc"]
    assert len(llm.chat(conversations, GREEDY, use_tqdm=False)) == 3


def test_bad_prompts_are_refused_before_any_runs(llm):
    with pytest.raises(RequestRejectedError, match="vocabulary"):
        llm.generate([[5], [300]], GREEDY, use_tqdm=False)
    assert llm.engine.stats().prompt_tokens == 0


def test_if_some_fail_the_error_holds_every_result(llm, monkeypatch):
    runner = llm.engine._core.runner
    run = runner.run

    def faulty(works):
        if any(99 in work.token_ids for work in works):
            raise RuntimeError("kernel fault")
        return run(works)

    monkeypatch.setattr(runner, "run", faulty)
    with pytest.raises(BatchError, match="1 of 2") as caught:
        llm.generate([[5, 6], [99, 6]], GREEDY, use_tqdm=False)
    good, bad = caught.value.outputs
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"


def test_the_progress_bar_shows_requests_speed_and_kv_use(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    err = capsys.readouterr().err
    assert "2/2" in err
    assert "tok/s" in err
    assert "KV" in err


def test_prompt_logprobs_equal_with_and_without_a_prefix_hit(llm):
    # vllm #8268, PR #42245
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    prompt = list(range(3, 60))
    first, again = (llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs for _ in range(2))
    assert first == again
    assert first[0] is None
    assert len(first) == len(prompt)
    assert all(token in entry for token, entry in zip(prompt[1:], first[1:]))


def test_logprobs_stay_in_step_with_tokens(llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, logprobs=3, ignore_eos=True)
    out = llm.generate("the fox", params, use_tqdm=False)[0].outputs[0]
    assert len(out.logprobs) == len(out.token_ids) == 9
    assert out.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(out.logprobs, out.token_ids))
    )


def test_n_samples_with_a_seed_are_distinct_and_reproducible(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    runs = [llm.generate("the fox", params, use_tqdm=False)[0] for _ in range(2)]
    texts = [[o.token_ids for o in run.outputs] for run in runs]
    assert texts[0] == texts[1]
    assert len({tuple(t) for t in texts[0]}) == 4


def test_penalties_see_the_same_history_after_preemption(tiny_model):
    # sglang PR #20724, vllm #16832: after preemption outputs were taken for prompt
    params = SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=120,
        min_tokens=120,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
    )
    results = []
    for blocks in (200, 24):
        with LLM(tiny_model, kernels="reference", num_blocks=blocks, max_model_len=300) as llm:
            for _ in range(200):
                llm.engine._core.scheduler.lengths.add(1)
            outputs = llm.generate([[i, i + 1, i + 2] for i in range(5, 11)], params, use_tqdm=False)
            results.append([o.outputs[0].token_ids for o in outputs])
            preemptions = llm.engine.stats().num_preemptions
    assert preemptions > 0
    assert results[0] == results[1]


def test_everybody_who_names_the_same_model_shares_one_engine(tiny_model):
    one = get_engine(tiny_model, **OPTIONS)
    two = LLM(tiny_model + "/", **OPTIONS)
    three = get_engine(tiny_model, kernels="reference")
    assert one.model is two.engine.model is three.model
    prompt = list(range(3, 50))
    one.submit(prompt, GREEDY).result(30)
    assert two.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens >= 32
    one.close()
    two.close()
    assert three.submit([5], GREEDY).result(30).finished, "closing one use leaves the others"
    three.close()
    with pytest.raises(EngineClosedError):
        three.submit([5], GREEDY)


def test_options_that_contradict_the_open_engine_are_not_ignored(tiny_model):
    with get_engine(tiny_model, **OPTIONS):
        with pytest.raises(ValueError, match="num_blocks=64"):
            get_engine(tiny_model, kernels="reference", num_blocks=32)
        with get_engine(tiny_model, kernels="reference", num_blocks=32, share=False) as own:
            assert own.stats().kv_blocks_total == 31


def test_threads_that_open_the_same_model_at_once_get_one_engine(tiny_model):
    engines = []
    threads = [
        threading.Thread(target=lambda: engines.append(get_engine(tiny_model, **OPTIONS))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(engine.model) for engine in engines}) == 1
    for engine in engines:
        engine.close()


def test_closing_gives_the_memory_back(tiny_model):
    import weakref

    llm = LLM(tiny_model, **OPTIONS)
    runner = weakref.ref(llm.engine._core.runner)
    llm.generate("a", GREEDY, use_tqdm=False)
    llm.close()
    gc.collect()
    assert runner() is None


def test_a_misspelt_option_names_the_nearest(tiny_model):
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(tiny_model, max_num_seq=3)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=tmp_path.name):
        LLM(str(tmp_path))


def test_an_interpreter_with_a_running_engine_exits_cleanly(tiny_model):
    code = (
        "from paged_backend import get_engine, SamplingParams\n"
        f"engine = get_engine({tiny_model!r}, kernels='reference', num_blocks=64)\n"
        "handle = engine.submit([5, 6], SamplingParams(max_tokens=400, ignore_eos=True))\n"
        "next(iter(handle))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_naming_a_default_is_no_reason_for_another_engine(llm, tiny_model):
    with LLM(tiny_model, **OPTIONS, max_num_batched_tokens=512) as same:
        assert same.engine.model is llm.engine.model
    with pytest.raises(ValueError, match="max_num_batched_tokens=512"):
        LLM(tiny_model, **OPTIONS, max_num_batched_tokens=300)


def test_a_step_has_more_tokens_on_a_gpu_unless_told_otherwise():
    from paged_backend.config import EngineConfig

    assert EngineConfig("x").token_budget == 512
    assert EngineConfig("x", device="cuda").token_budget == 2048
    assert EngineConfig("x", device="cuda", max_num_batched_tokens=100).token_budget == 100
    assert EngineConfig("x", max_num_batched_tokens=100).max_num_seqs == 100
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineConfig("x", max_num_batched_tokens=0)


def test_closing_twice_takes_nothing_from_others(tiny_model):
    mine, theirs = (LLM(tiny_model, **OPTIONS) for _ in range(2))
    mine.close()
    mine.close()
    with mine:
        pass
    assert len(theirs.generate([[5, 6]], GREEDY, use_tqdm=False)) == 1
    with pytest.raises(EngineClosedError, match="this LLM was closed"):
        mine.generate([[5, 6]], GREEDY, use_tqdm=False)
    theirs.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("a", {"temperature": 0}), r"SamplingParams\(\*\*options\)"),
        (lambda llm: llm.engine.submit("a", {"max_tokens": 1}), "must be SamplingParams, got dict"),
        (lambda llm: llm.chat("hi"), "a conversation is a list of messages"),
        (lambda llm: llm.chat(["hi"]), "a conversation is a list of messages"),
        (
            lambda llm: llm.chat([{"role": "user", "text": "x"}]),
            r"messages\.0\.content is missing: the message has only role, text",
        ),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {}}), "knows no 'multi_modal_data'"),
        (lambda llm: llm.generate(b"x"), "bytes"),
        (lambda llm: llm.generate([b"x"]), "bytes|a prompt must be text"),
        (lambda llm: SamplingParams(stop=5), "stop must be a string"),
        (lambda llm: SamplingParams(stop_token_ids=5), "stop_token_ids must be a list"),
    ],
)
def test_what_is_given_wrongly_is_named(llm, call, message):
    with pytest.raises((RequestRejectedError, TypeError, ValueError), match=message):
        call(llm)


def test_a_refusal_says_which_prompt_it_is_about(llm):
    with pytest.raises(RequestRejectedError, match=r"prompt 2 of 3: .*vocabulary") as refused:
        llm.generate([[5], [6], [300]], GREEDY, use_tqdm=False)
    assert refused.value.index == 2
