"""Grammars through the real engine, scheduler and sampler; logits are noise that depends on the whole context."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("llguidance")

from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.errors import RequestFailedError, RequestRejectedError
from paged_backend.runner.base import Result
from paged_backend.runner.sampler import Sampler
from paged_backend.sampling_params import SamplingParams
from paged_backend.testing import ScriptedRunner, scripted_core

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


class NoisyRunner(ScriptedRunner):
    """Reads the context back through the block table, as its parent does, and samples from noise over it."""

    sampler = Sampler()

    def _result(self, work):
        if not work.rows:
            return Result([], [])
        noise = np.random.default_rng(self._read(work)).standard_normal(self.vocab_size).astype(np.float32)
        logits = np.tile(3 * noise, (len(work.rows), 1))
        return Result(self.sampler.sample(logits, work.rows), [])


def open_engine(tokenizer, **options):
    num_blocks = options.get("num_blocks", 200)
    runner = NoisyRunner(num_blocks, options.get("block_size", 16), tokenizer.vocab_size)
    core = scripted_core(runner=runner, **{"num_blocks": num_blocks, **options})
    return Engine(core, tokenizer, EngineConfig("noise"), eos_token_ids=[EOS, 0])


@pytest.fixture
def engine(tokenizer):
    with open_engine(tokenizer) as engine:
        yield engine
        engine.check()


def params(**options):
    options.setdefault("structured_outputs", {"json": PERSON})
    return SamplingParams(**{"max_tokens": 90, "seed": 5, **options})


def valid(text):
    person = json.loads(text)
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 150
    assert all(len(tag) <= 12 for tag in person["tags"])
    return person


def test_every_output_is_complete_at_any_budget(engine):
    for temperature in (0.0, 1.0):
        handles = engine.submit_many(
            [f"person {i}" for i in range(40)],
            [params(max_tokens=60 + i, temperature=temperature, seed=i) for i in range(40)],
        )
        for i, handle in enumerate(handles):
            output = handle.result(60).outputs[0]
            valid(output.text)
            assert output.finish_reason == "stop"
            assert len(output.token_ids) <= 60 + i


def test_free_and_constrained_requests_share_a_batch(engine):
    free = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    alone = engine.submit("free", free).result(60).outputs[0].token_ids
    mixed = engine.submit_many(
        ["free", "a", "b"], [free, params(), params(structured_outputs={"choice": ["x", "y"]})]
    )
    assert mixed[0].result(60).outputs[0].token_ids == alone
    valid(mixed[1].result(60).outputs[0].text)
    assert mixed[2].result(60).outputs[0].text in ("x", "y")


def test_samples_of_one_request_each_follow_the_grammar(engine):
    outputs = engine.submit("many", params(n=5, temperature=1.0)).result(60).outputs
    people = [valid(output.text) for output in outputs]
    assert len({json.dumps(person) for person in people}) > 1
    alone = engine.submit("many", params(temperature=1.0)).result(60).outputs[0]
    assert alone.token_ids == outputs[0].token_ids


def test_preemption_leaves_the_output_as_it_was(tokenizer):
    prompts = [f"a person number {i} of several" for i in range(8)]
    wanted = [params(seed=i) for i in range(8)]
    results = []
    for num_blocks in (400, 14):
        with open_engine(tokenizer, num_blocks=num_blocks, block_size=16) as engine:
            handles = engine.submit_many(prompts, wanted)
            results.append([handle.result(60).outputs[0].token_ids for handle in handles])
            preemptions = engine.stats().num_preemptions
    assert preemptions > 0
    assert results[0] == results[1]


def test_resumed_output_goes_on_in_its_grammar(engine):
    whole = engine.submit("resume me", params()).result(60).outputs[0].token_ids
    cut = len(whole) // 2
    handle = engine.submit("resume me", params(), resume_output_ids={0: whole[:cut]})
    assert handle.result(60).outputs[0].token_ids == whole[cut:]


def test_an_invalid_schema_is_refused_at_the_door_before_anything_runs(engine):
    steps = engine.stats().num_steps
    with pytest.raises(RequestRejectedError, match="'type' at # cannot be 'strin'"):
        engine.submit_many(["a", "b"], [params(), params(structured_outputs={"json": {"type": "strin"}})])
    with pytest.raises(RequestRejectedError, match="max_tokens of at least"):
        engine.submit("a", params(max_tokens=3))
    assert engine.stats().num_steps == steps


def test_a_row_whose_grammar_fails_fails_alone(engine):
    # nothing but "q" may be sampled, and the grammar has no "q"
    only = tuple(engine.tokenizer.encode("q", add_special_tokens=False))
    bad, good = engine.submit_many(["a", "b"], [params(allowed_token_ids=only), params()])
    with pytest.raises(RequestFailedError, match="no token is left"):
        bad.result(60)
    valid(good.result(60).outputs[0].text)
    assert engine.stats().num_failed_steps == 0


def test_a_processor_that_overrules_the_grammar_does_not_break_it(engine):
    wild = engine.tokenizer.encode("q", add_special_tokens=False)[0]

    def push(prompt, output, logits):
        logits[wild] = 1e6
        return logits

    output = engine.submit("a", params(logits_processors=[push], temperature=0.0)).result(60).outputs[0]
    valid(output.text)


def test_no_end_before_min_tokens_where_the_grammar_can_go_on(engine):
    wanted = params(structured_outputs={"regex": "[a-z]*"}, min_tokens=25, max_tokens=40)
    assert len(engine.submit("a", wanted).result(60).outputs[0].token_ids) >= 25
    # and where it cannot, the grammar's end is the end
    ended = (
        engine.submit("a", params(structured_outputs={"choice": ["x"]}, min_tokens=25)).result(60).outputs[0]
    )
    assert (ended.text, ended.finish_reason) == ("x", "stop")


def test_stop_tokens_wait_for_an_allowed_end(engine):
    comma = engine.tokenizer.encode(",", add_special_tokens=False)
    compact = {
        "json": PERSON,
        "item_separator": ",",
        "key_separator": ":",
    }  # other tokens have the comma, too
    wanted = params(stop_token_ids=comma, structured_outputs=compact)
    output = engine.submit("a", wanted).result(60).outputs[0]
    valid(output.text)


def test_an_open_ended_grammar_that_reaches_max_tokens_says_length(engine):
    wanted = params(structured_outputs={"regex": "[a-z]+"}, max_tokens=6, ignore_eos=True)
    output = engine.submit("a", wanted).result(60).outputs[0]
    assert output.finish_reason == "length"
    assert output.text.isalpha()


def test_logprobs_are_of_the_token_that_was_taken(engine):
    output = engine.submit("a", params(logprobs=1, max_tokens=40)).result(60).outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    assert all(token in entry for token, entry in zip(output.token_ids, output.logprobs))


def test_a_beam_search_takes_no_grammar():
    from paged_backend.sampling_params import BeamSearch

    with pytest.raises(ValueError, match="structured_outputs must be None in a beam search"):
        SamplingParams(beam_search=BeamSearch(2), structured_outputs={"choice": ["a"]})
