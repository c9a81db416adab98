"""Beam search inside the engine: chunks, a crowded pool, preemption, aborts; always transformers' hypotheses."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from paged_backend import SamplingParams
from paged_backend.errors import RequestFailedError, RequestRejectedError
from paged_backend.sampling_params import BeamSearch

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def pair(make_pair: Any) -> Any:
    return make_pair("Llama", LLAMA)


def params(beams: int = 3, n: int = 1, length: int = 10, **more: Any) -> SamplingParams:
    options = {
        "ignore_eos": True,
        "detokenize": False,
        "max_tokens": length,
        "repetition_penalty": 1.0,
        **more,
    }
    return SamplingParams(n=n, beam_search=BeamSearch(beams), **options)


def expected(pair: Any, prompt: list[int], beams: int, n: int, length: int, **more: Any) -> list[list[int]]:
    out = pair.theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=n,
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        **more,
    )
    return out[:, len(prompt) :].tolist()


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("eos", [[7], [7, 9, 11, 13, 15, 17]])
def test_hypotheses_and_scores(early: Any, penalty: float, eos: list[int], pair: Any) -> None:
    for beams, length in ((2, 4), (4, 12)):
        prompt = torch.randint(0, 101, (9,), generator=torch.Generator().manual_seed(beams)).tolist()
        reference = pair.theirs.generate(
            torch.tensor([prompt]),
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=eos,
            max_new_tokens=length,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        search = BeamSearch(beams, penalty, early)
        options = SamplingParams(
            n=beams,
            beam_search=search,
            max_tokens=length,
            ignore_eos=True,
            stop_token_ids=eos,
            detokenize=False,
        )
        out = pair.ours.engine.submit(prompt, options).result(60)
        for completion, ids, score in zip(out.outputs, reference.sequences, reference.sequences_scores):
            new = ids[len(prompt) :].tolist()
            assert completion.token_ids == new[: len(completion.token_ids)]
            # the sum of log-probabilities: a negative penalty multiplies rounding like the score itself
            scale = len(completion.token_ids) ** penalty
            assert completion.beam.score * scale == pytest.approx(float(score) * scale, abs=1e-4)
            ended = completion.token_ids[-1] in eos
            assert completion.finish_reason == ("stop" if ended else "length")
            assert completion.stop_reason == (completion.token_ids[-1] if ended else None)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_crowded_pool(seed: int | None, make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that are preempted, resumed and forked in that state change no hypothesis.

    With a seed, requests lose blocks at random before a step, beams that wait for their group among them.
    """
    pair = make_pair("Llama", LLAMA, num_blocks=26, block_size=4, max_num_batched_tokens=16)
    engine = pair.ours.engine
    scheduler, choose = engine._core.scheduler, random.Random(seed)
    schedule = scheduler.schedule

    def rob_and_schedule() -> Any:
        if choose.random() < 0.3 and scheduler.running:
            scheduler._preempt(choose.choice(scheduler.running), choose.randint(1, 9))
        return schedule()

    if seed is not None:
        monkeypatch.setattr(scheduler, "schedule", rob_and_schedule)
    prompts = [
        torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in (3, 17, 9, 26, 5, 12)
    ]
    handles = []
    for prompt in prompts:
        greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
        handles.append(engine.submit(prompt, params(beams=3, n=2, length=12)))
        handles.append(engine.submit(prompt[::-1], greedy))
    outputs = [handle.result(120).outputs for handle in handles]
    for prompt, beams, plain in zip(prompts, outputs[::2], outputs[1::2]):
        assert [c.token_ids for c in beams] == expected(pair, prompt, 3, 2, 12)
        assert [c.token_ids for c in plain] == expected(pair, prompt[::-1], 1, 1, 20)
    assert seed is None or engine.stats().num_preemptions > 5
    engine.check()
    assert engine.stats().kv_blocks_used == 0


def test_beams_share_their_prompt(pair: Any) -> None:
    engine = pair.ours.engine
    engine.trim()
    prompt = list(range(3, 99))
    engine.submit(prompt, params(beams=8, length=4)).result(60)
    own = 8 * 2
    assert engine.stats().kv_peak_blocks < len(prompt) / 16 + own + 2 or engine.stats().kv_sharing > 2


def test_an_abort_frees_all_beams(pair: Any) -> None:
    engine = pair.ours.engine
    for wait in (0, 3, 9):
        handle = engine.submit(list(range(3, 60)), params(beams=6, length=150))
        other = engine.submit([5, 9], params(length=wait + 1))
        other.result(60)
        handle.abort()
    engine.submit([4], params()).result(60)
    engine.check()
    assert engine.stats().num_running == 0
    assert engine.stats().kv_blocks_used == 0


def test_a_failing_criterion_fails_its_search_only(pair: Any) -> None:
    def broken(prompt: Any, output: Any) -> bool:
        if len(output) == 3:
            raise KeyError("mine")
        return False

    engine = pair.ours.engine
    handles = [
        engine.submit([5, 9, 12], params(n=2, stop_criteria=[broken])),
        engine.submit([5, 9, 12], params()),
    ]
    with pytest.raises(RequestFailedError, match="mine"):
        handles[0].result(60)
    assert [c.token_ids for c in handles[1].result(60).outputs] == expected(pair, [5, 9, 12], 3, 1, 10)
    engine.check()


def test_a_failing_step_is_repeated_or_fails_the_search(pair: Any) -> None:
    engine = pair.ours.engine
    runner, calls = engine._core.runner, itertools.count()
    original = runner.run

    def run(works: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("once")
        return original(works)

    runner.run = run
    try:
        out = engine.submit([5, 9, 12], params(n=3)).result(60)
    finally:
        runner.run = original
    assert [c.token_ids for c in out.outputs] == expected(pair, [5, 9, 12], 3, 3, 10)


def test_what_can_never_run_is_refused(make_pair: Any) -> None:
    engine = make_pair("Llama", LLAMA, num_blocks=26, block_size=4, max_num_batched_tokens=16).ours.engine
    with pytest.raises(RequestRejectedError, match="num_beams"):
        engine.submit([5] * 10, params(beams=4, length=60))
    with pytest.raises(RequestRejectedError, match="max_num_seqs"):
        engine.submit([5], params(beams=17, length=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4}, "num_beams"),
        ({"temperature": 0.5}, "temperature"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop": ["x"], "detokenize": True}, "stop"),
    ],
)
def test_options_that_exclude_a_beam_search(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"beam_search": BeamSearch(3), **options})
    for bad in (
        {"num_beams": 1},
        {"num_beams": 2, "early_stopping": "maybe"},
        {"num_beams": 2, "length_penalty": "x"},
    ):
        with pytest.raises(ValueError, match="must be"):
            BeamSearch(**bad)
