"""Grammars against a model that answers at random: whatever it picks, the output is complete and valid."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("llguidance")

from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.constrain.options import SchemaRule, StructuredOutputs
from paged_backend.errors import RequestFailedError, RequestRejectedError

EOS = 2


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, [EOS])


def smallest_budget(grammar):
    low, high = 0, 1000
    while low < high:
        middle = (low + high) // 2
        try:
            grammar.open(middle, [EOS])
            high = middle
        except RequestRejectedError:
            low = middle + 1
    return low


def run(state, max_tokens, choose):
    """Generate as the engine does; returns (tokens, whether the end of the grammar ended it)."""
    tokens = []
    while len(tokens) < max_tokens:
        allowed = np.flatnonzero(state.mask())
        token = state.settle(choose(allowed))
        state.advance(token)
        if token == EOS:
            return tokens, True
        tokens.append(token)
        if state.ended:
            return tokens, True
    return tokens, False


def at_random(seed, longest=None):
    rng = random.Random(seed)

    def choose(allowed):
        inside = allowed[allowed != EOS]
        return int(rng.choice(inside if len(inside) else allowed))

    return choose


def test_every_schema_of_the_battery_within_any_budget(battery_schema, compiler, tokenizer):
    jsonschema = pytest.importorskip("jsonschema")
    grammar = compiler.compile(StructuredOutputs(json=battery_schema))
    least = smallest_budget(grammar)
    checker = jsonschema.Draft202012Validator(
        battery_schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed, extra in enumerate((0, 1, 2, 3, 5, 8, 13, 40, 100)):
        budget = max(least + extra, 1)
        tokens, _ = run(grammar.open(budget, [EOS]), budget, at_random(seed))
        text = tokenizer.decode(tokens)
        checker.validate(json.loads(text))
        assert "\\u" not in text
        assert json.loads(text) is not None or text == "null"


def test_a_schema_that_cannot_fit_names_what_would(compiler):
    grammar = compiler.compile(
        StructuredOutputs(json={"type": "array", "items": {"const": 7}, "minItems": 9})
    )
    with pytest.raises(RequestRejectedError, match=r"max_tokens of at least (\d+)") as caught:
        grammar.open(5, [EOS])
    enough = int(str(caught.value).split("at least ")[1].split()[0])
    assert grammar.open(enough, [EOS]).mask().any()


def test_no_free_whitespace_and_raw_unicode(compiler, tokenizer):
    wanted = StructuredOutputs(
        json={"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}
    )
    state = compiler.compile(wanted).open(60, [EOS])
    for token in tokenizer.encode('{"k": "', add_special_tokens=False):
        assert state.mask()[token]
        state.settle(token)
        state.advance(token)
    for text, good in ((" ", True), ("é", True), ("\n", False), ("\t", False)):
        assert bool(state.mask()[tokenizer.encode(text, add_special_tokens=False)[0]]) is good


def test_json_is_spaced_as_models_write_it_unless_the_caller_says_otherwise(compiler, tokenizer):
    value = {"a": 1, "b": [2, {"c": 3}]}
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": value["b"]}},
        "required": ["a", "b"],
    }

    def written(**wanted):
        tokens, _ = run(compiler.compile(StructuredOutputs(**wanted)).open(60, [EOS]), 60, at_random(0))
        return tokenizer.decode(tokens)

    assert written(json=schema) == json.dumps(value)
    assert written(grammar=f"start: %json {json.dumps(schema)}") == json.dumps(value)
    rule = SchemaRule("value", schema, "a rule")
    assert written(grammar="start: value", schemas=[rule]) == json.dumps(value)
    compact = {"item_separator": ",", "key_separator": ":"}
    assert written(json=schema, **compact) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [
        ({"choice": ["yes", "no", 'with "quotes"', "größe"]}, {"yes", "no", 'with "quotes"', "größe"}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"grammar": 'start: "x" D\nD: /[0-1]/'}, {"x0", "x1"}),
        ({"grammar": 'root ::= "x" [0-1]'}, {"x0", "x1"}),
        ({"json_object": True}, None),
    ],
)
def test_every_kind(wanted, accepted, compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(**wanted))
    for seed in range(10):
        tokens, ended = run(grammar.open(40, [EOS]), 40, at_random(seed))
        assert ended
        text = tokenizer.decode(tokens)
        assert text in accepted if accepted else isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "strin"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"regex": "(a"},
        {"grammar": "start: missing"},
        {"grammar": "root ::= ("},
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(wanted, compiler):
    with pytest.raises(RequestRejectedError, match="structured_outputs"):
        compiler.compile(StructuredOutputs(**wanted))


def test_equal_forms_are_compiled_once(compiler):
    schema = {"type": "object", "properties": {"z": {"type": "integer"}}}
    assert compiler.compile(StructuredOutputs(json=schema)) is compiler.compile(
        StructuredOutputs(json=schema)
    )


def test_all_ends_wait_for_an_allowed_end(compiler, tokenizer):
    digit = tokenizer.encode("5", add_special_tokens=False)[0]
    comma = tokenizer.encode(",", add_special_tokens=False)[0]
    grammar = compiler.compile(StructuredOutputs(regex="[0-9,]{2,}"))
    state = grammar.open(20, [EOS, 0, comma])  # another eos, and a stop token that is text
    assert not state.mask()[[EOS, 0, comma]].any()
    for _ in range(2):
        state.settle(digit)
        state.advance(digit)
    assert state.mask()[[EOS, 0, comma, digit]].all()


def test_ignored_end_of_sequence_is_never_allowed(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(regex="a*")).open(20, [], [EOS])
    assert not state.mask()[EOS]


def test_a_fork_goes_its_own_way(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputs(choice=["ax", "by"]))
    first = grammar.open(10, [EOS])
    second = first.fork()
    a, b = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "ab")
    for state, token in ((first, a), (second, b)):
        assert state.settle(token) == token
        state.advance(token)
    assert not np.array_equal(first.mask(), second.mask())


def test_settle_changes_nothing(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(regex="[ab]*c")).open(6, [EOS])
    before = state.mask().copy()
    a, b = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "ab")
    assert [state.settle(t) for t in (a, b, a)] == [a, b, a]
    state.advance(a)
    assert np.array_equal(state.mask(), before)


def test_rollback_takes_back_speculated_tokens(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(regex="abc[de]")).open(8, [EOS])
    ids = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "abcd"]
    masks = []
    for token in ids:
        masks.append(state.mask().copy())
        state.advance(token)
    assert state.ended
    for count, mask in ((1, masks[3]), (2, masks[1]), (1, masks[0])):
        state.rollback(count)
        assert np.array_equal(state.mask(), mask)


def test_a_token_that_is_not_allowed_fails(compiler, tokenizer):
    state = compiler.compile(StructuredOutputs(choice=["ax"])).open(8, [EOS])
    with pytest.raises(RequestFailedError, match="does not allow"):
        state.advance(tokenizer.encode("q", add_special_tokens=False)[0])


def test_without_the_library_the_message_has_the_command(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestRejectedError, match="pip install"):
        GrammarCompiler(tokenizer, [EOS]).compile(StructuredOutputs(regex="a"))


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(RequestRejectedError, match="fast tokenizer"):
        GrammarCompiler(object(), [EOS]).compile(StructuredOutputs(regex="a"))
