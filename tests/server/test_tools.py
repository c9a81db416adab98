"""Tool calls over a real port: the grammar makes even a random model call well."""

from __future__ import annotations

import json

import openai
import pytest

pytest.importorskip("llguidance")

HELLO = [{"role": "user", "content": "what is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


def ask(server, **options):
    return server.client().chat.completions.create(
        **{
            "model": "tiny",
            "messages": HELLO,
            "tools": [WEATHER, CLOCK],
            "max_tokens": 150,
            "seed": 3,
            **options,
        }
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_a_call(server, choice):
    answer = ask(server, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert call.type == "function"
    assert call.id
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Rome", "Oslo")
        assert isinstance(arguments["days"], int)
    assert call.function.name == "weather" or choice == "required"


@pytest.mark.parametrize("max_tokens", [60, 70, 90, 150])
def test_streams_and_whole_answers_agree_however_long(server, max_tokens):
    # vllm #53269, #53255, PR #9209
    options = {"tool_choice": "required", "max_tokens": max_tokens, "n": 2}
    whole = ask(server, **options).choices
    found: list[dict] = [{"content": "", "calls": {}, "reason": None} for _ in whole]
    for chunk in ask(server, stream=True, **options):
        for choice in chunk.choices:
            mine = found[choice.index]
            mine["content"] += choice.delta.content or ""
            mine["reason"] = choice.finish_reason or mine["reason"]
            for call in choice.delta.tool_calls or ():
                if call.index not in mine["calls"]:
                    assert call.id
                    assert call.type == "function"
                    mine["calls"][call.index] = [call.function.name, ""]
                mine["calls"][call.index][1] += call.function.arguments or ""
    for mine, choice in zip(found, whole):
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        assert list(mine["calls"].values()) == calls
        assert mine["reason"] == choice.finish_reason
        assert mine["content"] == (choice.message.content or "")
        assert choice.message.tool_calls != []


def test_the_clients_own_accumulator_takes_the_stream(server):
    with server.client().chat.completions.stream(
        model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=150, seed=3
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_free_choice_tools_with_results_and_no_tools(server):
    auto = ask(server, max_tokens=100)
    assert auto.choices[0].finish_reason in ("length", "stop", "tool_calls")
    none = ask(server, tool_choice="none", max_tokens=10)
    plain = ask(server, tools=openai.omit, max_tokens=10)
    assert none.choices[0].message.content == plain.choices[0].message.content
    empty = ask(server, tools=[], tool_choice="auto", max_tokens=10)
    assert empty.choices[0].message.content == plain.choices[0].message.content
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    tokens = server.post("/tokenize", {"messages": history, "tools": [CLOCK]}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "noon" in prompt
    assert prompt.count("clock") == 2
    assert ask(server, messages=history, max_tokens=5).choices


def test_a_schema_and_tools_together(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(server, response_format=form, tools=[CLOCK], max_tokens=120).choices[0]
    if answer.message.tool_calls:
        assert answer.message.tool_calls[0].function.name == "clock"
    else:
        assert isinstance(json.loads(answer.message.content)["a"], bool)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools.0"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
)
def test_tools_that_make_no_sense(server, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(ab)+c"},
        {"choice": ["yes", "no"]},
        {"json": {"enum": [1, 2]}},
        {"grammar": 'start: "x" "y"?'},
    ],
)
def test_structured_outputs(server, form):
    import re

    options = {"max_tokens": 40, "tools": openai.omit}
    text = ask(server, **options, extra_body={"structured_outputs": form}).choices[0].message.content
    good = {"regex": r"(ab)+c", "choice": "yes|no", "json": "1|2", "grammar": "xy?"}[next(iter(form))]
    assert re.fullmatch(good, text)


@pytest.mark.parametrize(
    "form", [{"regex": "("}, {"nothing": 1}, {}, {"json": {"type": "strange"}}, {"choice": []}]
)
def test_structured_outputs_that_cannot_be(server, form):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, tools=openai.omit, extra_body={"structured_outputs": form})
    assert caught.value.param == "structured_outputs"
