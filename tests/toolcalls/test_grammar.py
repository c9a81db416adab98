"""Replies held to tool calls, from a model that answers at random."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llguidance")

from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.errors import RequestRejectedError
from paged_backend.testing import small_tokenizer
from paged_backend.toolcalls import parse_reply, tool_outputs
from paged_backend.toolcalls.formats import HERMES, LLAMA3, MISTRAL

EOS = 2
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["city", "unit"],
            "$defs": {"Unit": {"enum": ["c", "f"]}},
        },
    },
}
TREE = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "properties": {
                "leaf": {"type": "integer"},
                "branch": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            },
            "required": ["leaf", "branch"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, TREE, NOW]
PARAMETERS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def generate(tokenizer):
    compiler = GrammarCompiler(tokenizer, [EOS])

    def run(outputs, seed, max_tokens=160, begin=""):
        rng = random.Random(seed)
        state = compiler.compile(outputs).open(max_tokens, [EOS])
        tokens = []
        script = tokenizer.encode(begin, add_special_tokens=False)
        while len(tokens) < max_tokens and not state.ended:
            allowed = np.flatnonzero(state.mask())
            inside = allowed[allowed != EOS]
            wish = script[len(tokens)] if len(tokens) < len(script) else rng.choice(inside)
            token = state.settle(int(wish))
            if token == EOS:
                break
            state.advance(token)
            tokens.append(token)
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return run


def check_calls(reply):
    jsonschema = pytest.importorskip("jsonschema")
    assert not reply.invalid
    for call in reply.calls:
        jsonschema.validate(call.parsed, PARAMETERS[call.name])


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL], ids=lambda f: f.name)
@pytest.mark.parametrize("choice", ["required", "any"])
def test_forced_calls_are_valid_calls_and_nothing_else(tool_format, choice, generate):
    for seed in range(12):
        one = parse_reply(tool_format, generate(tool_outputs(tool_format, TOOLS, choice), seed))
        assert len(one.calls) == 1
        assert one.content == ""
        check_calls(one)
        several = parse_reply(
            tool_format, generate(tool_outputs(tool_format, TOOLS, choice, parallel=True), seed)
        )
        assert len(several.calls) >= 1
        check_calls(several)


def test_a_named_tool_is_called_once_and_no_other(generate):
    for seed in range(8):
        reply = parse_reply(HERMES, generate(tool_outputs(HERMES, TOOLS, "plant", parallel=True), seed))
        assert [call.name for call in reply.calls] == ["plant"]
        check_calls(reply)


def test_a_tool_without_parameters_is_called_with_none(generate):
    assert parse_reply(HERMES, generate(tool_outputs(HERMES, [NOW], "any"), 0)).calls[0].parsed == {}


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL], ids=lambda f: f.name)
def test_free_text_may_call_but_what_is_begun_is_a_valid_call(tool_format, generate):
    outputs = tool_outputs(tool_format, TOOLS)
    for seed in range(8):
        text = generate(outputs, seed, begin=f"Let me see.\n{tool_format.start}")
        reply = parse_reply(tool_format, text)
        assert reply.content.startswith("Let me see.")
        assert reply.calls
        check_calls(reply)
    assert parse_reply(tool_format, generate(outputs, 1, max_tokens=20)).invalid == []


def test_calls_without_a_marker_leave_free_text_free():
    assert tool_outputs(LLAMA3, TOOLS) is None


def test_a_marker_that_is_a_special_token(generate, tokenizer):
    special = replace(MISTRAL, start="<|im_start|>", start_id=1)
    text = generate(tool_outputs(special, [NOW], "any"), 0)
    assert text == '<|im_start|>[{"name": "now", "arguments": {}}]'
    assert special.skip_special_tokens is False


def test_a_call_or_an_answer_of_a_schema(generate):
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    outputs = tool_outputs(HERMES, [NOW], response_schema=schema)
    assert isinstance(json.loads(generate(outputs, 0, begin="{"))["answer"], int)
    assert parse_reply(HERMES, generate(outputs, 0, begin="<tool_call>")).calls[0].name == "now"


def test_an_unknown_choice_names_the_tools():
    with pytest.raises(RequestRejectedError, match=r"'nope' is none of the tools: get_weather, plant, now"):
        tool_outputs(HERMES, TOOLS, "nope")
