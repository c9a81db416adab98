"""Schemas of tools as servers and generators write them: what of each is held to, and what is named as left out."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")
from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.constrain.options import SchemaRule, StructuredOutputs
from paged_backend.constrain.relax import relax
from paged_backend.errors import RequestRejectedError

EOS = 2
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_FILE = json.loads((Path(__file__).parent / "tool_schemas.json").read_text(encoding="utf-8"))
# name: what no grammar is held to, as (keyword, place), and the schema
CORPUS, INVALID = (
    {name: ([tuple(part) for part in case["left_out"]], case["schema"]) for name, case in _FILE[kind].items()}
    for kind in (
        "corpus",
        "invalid",
    )  # what JSON Schema does not know, or knows otherwise; tools are relaxed there, too
)
NULLS = {
    "type": "object",
    "properties": {"a": {**DIGIT, "enum": None, "description": None}},
    "required": None,
    "additionalProperties": None,
}


@pytest.fixture(scope="module")
def generate(tokenizer):
    compiler = GrammarCompiler(tokenizer, [EOS])

    def run(outputs, seed, max_tokens=100):
        rng = random.Random(seed)
        state = compiler.compile(outputs).open(max_tokens, [EOS])
        tokens = []
        while len(tokens) < max_tokens and not state.ended:
            allowed = np.flatnonzero(state.mask())
            token = state.settle(int(rng.choice(allowed)))
            if token == EOS:
                break
            state.advance(token)
            tokens.append(token)
        return json.loads(tokenizer.decode(tokens))

    return run


def tool(schema, strict=False, name="it"):
    rule = SchemaRule("args", schema, f"tool {name!r}", strict, foreign=True)
    return StructuredOutputs(grammar="start: args", schemas=[rule])


def is_valid(schema, value):
    jsonschema = pytest.importorskip("jsonschema")
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value)


def left_out(caplog):
    parts = [record.getMessage().split(" at ") for record in caplog.records]
    return [(what.split("'")[-2], place.split()[0]) for what, place in parts]


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_held_to_is_true_of_every_output_and_the_rest_is_named(name, generate, caplog):
    lost, schema = CORPUS[name]
    with caplog.at_level(logging.WARNING, "paged_backend.constrain"):
        values = [generate(tool(schema, name=name), seed) for seed in range(12)]
    assert left_out(caplog) == lost
    assert all(record.getMessage().startswith(f"tool {name!r}: ") for record in caplog.records)
    held = schema if not lost else relax(schema)[0]
    assert all(is_valid(held, value) for value in values)


@pytest.mark.parametrize("name", [name for name, (lost, _) in CORPUS.items() if lost])
def test_strict_names_tool_and_keyword(name, generate):
    (keyword, place), schema = CORPUS[name][0][0], CORPUS[name][1]
    with pytest.raises(RequestRejectedError, match=f"tool 'it': '{keyword}' at {place} ".replace("$", r"\$")):
        generate(tool(schema, strict=True), 0)
    with pytest.raises(
        RequestRejectedError, match=f"structured_outputs.json: '{keyword}'".replace("$", r"\$")
    ):
        generate(StructuredOutputs(json=schema), 0)
    generate(StructuredOutputs(json=schema, strict=False), 0)


def candidates():
    """Values that schemas of the corpus tell apart."""
    small = [0, 1, 5, 7, "", "a", "-", True, None, "https://x", 0.5]
    objects = [{}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": 5, "b": 1}, {"c": 3}, {"a": 1, "c": 3},
               {"a": "x"}, {"x": 1},
               {"x": 1, "y": 2}, {"k1": 1}, {"k": 1}, {"long": 1}, {"x-y": 1}, {"v": 1, "next": None},
               {"v": 1, "next": {"v": 2, "next": None}}, {"p": None}, {"p": {"a": 1}}, {"p": {"b": 1}}, {"n": 1},
               {"n": 0.5}, {"pet": {"kind": "cat"}}, {"pet": {"kind": "cow"}}, {"h": {"xy": 1}}, {"h": {"xy": "a"}},
               {"tags": ["a", "a"]}, {"tags": ["a", "b"]}, {"x": ""}, {"x": "a"}, {"x": "-a"}]  # fmt: skip
    arrays = [[], [1], [1, True], [1, "a"], [7, 7], [7, 1, 7], [1, 1], ["a"], [1, True, 2]]
    return small + objects + arrays


# two have references that the validator cannot follow either
@pytest.mark.parametrize("name", [name for name in CORPUS if name not in ("remote", "in a circle")])
def test_a_relaxed_schema_admits_all_that_the_schema_does_and_the_same_where_nothing_is_lost(name):
    lost, schema = CORPUS[name]
    relaxed, found = relax(schema)
    draft = {name: schema[name] for name in ("$schema",) if name in schema}
    for value in candidates():
        if is_valid(schema, value):
            assert is_valid({**draft, **relaxed}, value), value
        elif not lost and not found:
            assert not is_valid({**draft, **relaxed}, value), value


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_json_schema_is_relaxed_in_tools_and_refused_in_a_callers_own(name, generate, caplog):
    lost, schema = INVALID[name]
    with caplog.at_level(logging.WARNING, "paged_backend.constrain"):
        assert isinstance(generate(tool(schema, name=name), 0), dict)
    assert left_out(caplog) == lost
    for strict in (True, False):
        with pytest.raises(RequestRejectedError, match=f"'{lost[0][0]}' at {lost[0][1]} "):
            generate(StructuredOutputs(json=schema, strict=strict), 0)


def test_keywords_that_are_null_say_nothing(generate, caplog):
    assert set(generate(tool(NULLS, strict=True), 0)) <= {"a"}
    assert not caplog.records


def test_a_keyword_is_named_once_for_each_tool(tokenizer, caplog):
    compiler = GrammarCompiler(tokenizer, [EOS])
    _, schema = CORPUS["set[str]"]
    for title in ("a", "b"):
        compiler.compile(tool({**schema, "title": title}))
    assert len(caplog.records) == 1
