"""A request that goes on from the output of an earlier run gives exactly the rest of it."""

from __future__ import annotations

import pytest

from paged_backend import EngineConfig, SamplingParams
from paged_backend.engine.factory import build_engine
from paged_backend.errors import RequestRejectedError

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def engine(tiny_model):
    with build_engine(EngineConfig(tiny_model, threads=1)) as engine:
        yield engine


def run(engine, params, **options):
    return engine.submit(PROMPT, params, **options).result(60)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 0.8, "min_tokens": 25, "stop_token_ids": tuple(range(3, 120))},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 0.8, "bad_words": ["a", "e", "the"]},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("done", [1, 15, 16, 17, 39])
def test_the_rest_is_the_rest(engine, options, done):
    params = SamplingParams(max_tokens=40, seed=7, **options)
    whole = run(engine, params).outputs[0]
    done = min(done, len(whole.token_ids) - 1)
    rest = run(engine, params, resume_output_ids={0: whole.token_ids[:done]}).outputs[0]
    assert rest.token_ids == whole.token_ids[done:]
    assert rest.finish_reason == whole.finish_reason
    assert rest.logprobs == (None if whole.logprobs is None else whole.logprobs[done:])
    assert whole.text.endswith(rest.text)


def test_pieces_of_text_join_even_within_a_character_and_a_stop_string(engine):
    params = SamplingParams(max_tokens=60, seed=3, temperature=1.0, ignore_eos=True)
    whole = run(engine, params).outputs[0]
    stop = whole.text[30:36]
    stopped = SamplingParams(max_tokens=60, seed=3, temperature=1.0, ignore_eos=True, stop=stop)
    expected = run(engine, stopped).outputs[0]
    assert expected.finish_reason == "stop"
    left = len(expected.text)
    for done in range(1, len(expected.token_ids)):
        rest = run(engine, stopped, resume_output_ids={0: whole.token_ids[:done]}).outputs[0]
        assert rest.stop_reason == stop
        assert expected.text.endswith(rest.text)
        assert len(rest.text) <= left
        left = len(rest.text)


def test_samples_go_on_each_from_its_own_place(engine):
    params = SamplingParams(n=3, max_tokens=30, seed=1, temperature=1.0)
    whole = run(engine, params).outputs
    resume = {0: whole[0].token_ids[:5], 2: whole[2].token_ids[:21]}
    rest = run(engine, params, resume_output_ids=resume).outputs
    assert rest[0].token_ids == whole[0].token_ids[5:]
    assert rest[1].token_ids == []  # it has ended, says the caller
    assert rest[2].token_ids == whole[2].token_ids[21:]
    engine.check()


def test_a_grammar_goes_on_too(engine):
    pytest.importorskip("llguidance")
    form = {"json": {"type": "array", "items": {"enum": ["fox", "dog"]}, "minItems": 5, "maxItems": 9}}
    params = SamplingParams(max_tokens=80, seed=1, temperature=1.0, structured_outputs=form)
    whole = run(engine, params).outputs[0]
    for done in (1, 7, len(whole.token_ids) - 1):
        rest = run(engine, params, resume_output_ids={0: whole.token_ids[:done]}).outputs[0]
        assert rest.token_ids == whole.token_ids[done:]
        assert whole.text.endswith(rest.text)


@pytest.mark.parametrize(
    ("options", "resume", "match"),
    [
        ({}, {}, "name samples"),
        ({}, {1: [5]}, "name samples"),
        ({"max_tokens": 3}, {0: [5, 6, 7]}, "nothing is left"),
        ({}, {0: [300]}, "vocabulary"),
        ({"prompt_logprobs": 1}, {0: [5]}, "excludes"),
    ],
)
def test_what_cannot_be_resumed_is_refused(engine, options, resume, match):
    with pytest.raises(RequestRejectedError, match=match):
        engine.submit(PROMPT, SamplingParams(**options), resume_output_ids=resume)


def test_prefixes_are_shared_within_a_salt_only(engine):
    def cached(salt):
        handle = engine.submit("salted " * 30, SamplingParams(max_tokens=1), cache_salt=salt)
        return handle.result(60).num_cached_tokens > 0

    assert [cached("a"), cached("a"), cached("b"), cached("a")] == [False, True, False, True]
