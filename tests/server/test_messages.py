"""/v1/messages through Anthropic's client, and what it says without one."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("anthropic")
pytest.importorskip("fastapi")
import anthropic

from paged_backend.outputs import CompletionOutput
from paged_backend.server.wire.message_events import MessageBuilder
from paged_backend.server.wire.replies import Reply
from paged_backend.toolcalls import ToolCallParser
from paged_backend.toolcalls.formats import HERMES

FOX = [{"role": "user", "content": "the quick brown fox"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


def client_of(server, **options):
    return anthropic.Anthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, **options})


def request(**options):
    """Arguments of the client, whose later versions have no names for some fields of the API."""
    options = {"model": "tiny", "max_tokens": 12, "messages": FOX, "temperature": 0, **options}
    plain = {
        name: options.pop(name)
        for name in ("temperature", "seed", "ignore_eos", "structured_outputs")
        if name in options
    }
    return {**options, "extra_body": {**plain, **options.get("extra_body", {})}}


def create(server, **options):
    return client_of(server).messages.create(**request(**options))


def stream_of(server, **options):
    return client_of(server).messages.stream(**request(**options))


def plain(message):
    """Content in the shapes of the API, without what the client adds to them."""
    return [
        {name: value for name, value in block.items() if value is not None}
        for block in message.model_dump(exclude={"content": {"__all__": {"parsed_output"}}})["content"]
    ]


def chat(server, messages, **options):
    given = {"model": "tiny", "max_tokens": 12, "messages": messages, "temperature": 0, **options}
    return server.client().chat.completions.create(**given)


def count(server, **body):
    return client_of(server).messages.count_tokens(**{"model": "tiny", "messages": FOX, **body}).input_tokens


def openai_count(server, messages, **body):
    return len(server.post("/tokenize", {"messages": messages, **body}).json()["tokens"])


def test_text(server):
    answer = create(server, system="be brief", metadata={"user_id": "a"}, service_tier="auto")
    same = chat(server, [{"role": "system", "content": "be brief"}, *FOX])
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == same.choices[0].message.content
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 12
    assert answer._request_id


def test_a_cached_prefix_is_counted_apart_from_new_input(server):
    words = [{"role": "user", "content": "seven wizards mind a lazy dog " * 12}]
    first, second = create(server, messages=words), create(server, messages=words)
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == total
    assert second.usage.cache_read_input_tokens > 0
    assert total == count(server, messages=words)


def test_a_stream_is_anthropics_sequence_of_events(server):
    whole = create(server, temperature=1, seed=4)
    with stream_of(server, temperature=1, seed=4) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        last = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert plain(last) == plain(whole)
    assert last.stop_reason == whole.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 12
    sums = [m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (last, whole)]
    assert sums[0] == sums[1]


def test_a_silent_stream_says_that_it_lives(server, monkeypatch):
    monkeypatch.setattr("paged_backend.server.wire.message_events.PING_SECONDS", 0.02)
    body = {"max_tokens": 4, "messages": FOX, "stream": True}
    with server.hold() as gate, server.http.stream("POST", "/v1/messages", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("event: "))
        names = [next(lines) for _ in range(5)]
        gate.open()
        rest = list(lines)
    assert names == ["event: message_start", *["event: ping"] * 4]
    assert rest[-1] == "event: message_stop"


def test_stop_sequences_are_named(server):
    text = create(server, max_tokens=40).content[0].text
    stop = text[8:11]
    answer = create(server, max_tokens=40, stop_sequences=["never found", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)]


def test_max_tokens_beyond_the_context_are_what_the_context_leaves(server):
    answer = create(server, max_tokens=32_000, ignore_eos=True, timeout=60)
    left = 1024 - count(server)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens == left


def test_an_answer_goes_on_from_a_final_assistant_turn(server):
    history = [*FOX, {"role": "assistant", "content": "jumps over"}]
    more = chat(server, history, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert create(server, messages=history).content[0].text == more.choices[0].message.content


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools(server, choice):
    pytest.importorskip("llguidance")
    options = {
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "max_tokens": 150,
        "temperature": 1,
        "seed": 3,
    }
    answer = create(server, **options)
    (call,) = answer.content
    assert (call.type, answer.stop_reason) == ("tool_use", "tool_use")
    if call.name == "weather":
        assert call.input["city"] in ("Rome", "Oslo")
    with stream_of(server, **options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert json.loads("".join(parts) or "{}") == streamed.input == call.input
    assert streamed.name == call.name


class Told:
    """A job that tells ``outputs``."""

    prompt_tokens, cached_tokens, output_tokens = 7, 3, 5

    def __init__(self, outputs):
        self.outputs = outputs

    async def news(self, patience=None):
        for output in self.outputs:
            yield [(0, output)]


@pytest.mark.parametrize(
    ("arguments", "found"), [('{"n": 1, "text": "ab', {"n": 1, "text": "ab"}), ("{", {}), ("", {})]
)
async def test_arguments_that_were_cut_off_are_as_far_as_they_came(arguments, found):
    outputs = [
        CompletionOutput(0, 'I note.\n<tool_call>\n{"name": "note", "arguments": '),
        CompletionOutput(0, arguments, finish_reason="length"),
    ]
    made = [
        MessageBuilder(Told(outputs), Reply(ToolCallParser(HERMES)), "msg_1", "tiny", False) for _ in range(2)
    ]
    message = json.loads(await made[0].whole())
    text, call = message["content"]
    assert (text["text"], call["name"], call["input"]) == ("I note.", "note", found)
    assert message["stop_reason"] == "max_tokens"
    usage = {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert message["usage"] == usage
    events = [json.loads(line[6:]) for body in [b async for b in made[1].events()]
              for line in body.decode().splitlines() if line.startswith("data: ")]  # fmt: skip
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    ends = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert (starts, ends) == (["text", "tool_use"], [0, 1])
    pieces = [
        event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == arguments
    assert events[-2]["usage"] == usage


def test_a_history_is_the_same_prompt_as_openais(server):
    """Blocks, labels, results, turns in a row: the tokens are those of the chat they mean."""
    label = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "what is", **label}]},
        {"role": "user", "content": "the weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "let me see", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a1", "name": "weather", "input": {"city": "Rome", "days": 1}, **label},
            {"type": "tool_use", "id": "a2", "name": "clock", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "a2", "is_error": True, "content": "no clock"},
            {"type": "text", "text": "so?"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be", **label}, {"type": "text", "text": "brief"}]
    calls = [
        {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}},
        {"id": "a2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]  # fmt: skip
    same = [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "what is\nthe weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "a2", "content": "Error: no clock"},
        {"role": "user", "content": "so?"},
    ]
    tools = [
        {"type": "function", "function": {
            "name": tool["name"], "parameters": tool["input_schema"],
            **({"description": tool["description"]} if "description" in tool else {}),
        }}
        for tool in (WEATHER, CLOCK)
    ]  # fmt: skip
    ours = [{"type": "custom", **WEATHER, **label}, {**CLOCK, "eager_input_streaming": True}]
    body = {"messages": messages, "system": system, "tools": ours, "cache_control": {"type": "ephemeral"}}
    assert count(server, **body) == openai_count(server, same, tools=tools)
    answer = create(server, **body)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == count(server, **body)
    assert (
        "".join(block.text for block in answer.content if block.type == "text")
        == chat(server, same, tools=tools).choices[0].message.content
    )


def test_structured_output(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"jumps": {"type": "boolean"}}, "required": ["jumps"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    answer = create(server, max_tokens=60, output_config={"format": form})
    assert isinstance(json.loads(answer.content[0].text)["jumps"], bool)
    assert answer.stop_reason == "end_turn"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0 has type 'image'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [*FOX, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        ]}]}, "tool_result"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]},
        ]}]}, "messages.0.content.0.content.0 has type 'image'"),
        ({"system": [IMAGE]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0 has type 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}}, "context_management"),
        ({"extra_body": {"container": "a"}}, "container"),
        ({"extra_body": {"n": 2}}, "n is not supported"),
        ({"extra_body": {"stop": "a"}}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(server, options, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(server, **options)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert caught.value.request_id


def test_what_asks_for_what_is_done_anyway_is_accepted(server):
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for thinking in ("disabled", "adaptive"):
        assert create(server, thinking={"type": thinking}, extra_body={"context_management": keep}).content
    # of a model that does not think more or less
    assert create(server, output_config={"effort": "low"}).content


def test_errors_have_anthropics_shape(server):
    client = client_of(server)
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="gpt", max_tokens=1, messages=FOX)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert "'tiny'" in caught.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    assert caught.value.body["type"] == "error"


def test_models(server):
    found = client_of(server).models.list()
    assert [model.id for model in found] == ["tiny", "second-name"]
    model = client_of(server).models.retrieve("tiny")
    assert (model.type, model.max_input_tokens) == ("model", 1024)


def test_keys(start):
    with start(api_keys=("sesame",)) as server:
        body = request(model=server.serving.name)
        assert client_of(server, api_key="sesame").messages.create(**body).content
        assert client_of(server, api_key=None, auth_token="sesame").messages.create(**body).content
        body = {"model": server.serving.name, "max_tokens": 1, "messages": FOX}
        for key in ("", "wrong"):
            answer = server.post("/v1/messages", body, headers={"x-api-key": key})
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"


def test_an_error_in_the_middle_is_an_event(server):
    client = server.serving.client
    with server.hold() as gate:
        gate.allow()
        stream = create(server, stream=True, max_tokens=900, ignore_eos=True)
        next(stream)
        remote = next(iter(client._requests.values()))
        server.server._loop.call_soon_threadsafe(client._take, remote, {
            "outputs": [], "error": {"kind": "failed", "message": "the model broke"},
        })  # fmt: skip
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
        assert caught.value.body["error"] == {"type": "api_error", "message": "the model broke"}
        server.server._loop.call_soon_threadsafe(client.send, {"t": "abort", "id": remote.number})


THINKER = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)


def test_thoughts_are_blocks_of_their_own(start):
    pytest.importorskip("llguidance")
    form = {"regex": "[a-z]{3,9} [a-z]{3,9}\n</think>\n\n[a-z]{4,9}"}
    with start(chat_template=THINKER, served_model_names=("tiny",)) as server:
        options = {"max_tokens": 60, "structured_outputs": form}
        answer = create(server, **options)
        thought, text = answer.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert len(thought.thinking.split()) == 2
        assert text.text.isalpha()
        with stream_of(server, **options) as stream:
            deltas = [event for event in stream if event.type in ("thinking", "text")]
            assert plain(stream.get_final_message()) == plain(answer)
        assert "".join(event.thinking for event in deltas if event.type == "thinking") == thought.thinking
        history = [*FOX, {"role": "assistant", "content": answer.content}, *FOX]
        spelled = {"role": "assistant", "content": f"<think>{thought.thinking}</think>{text.text}"}
        assert count(server, messages=history) == openai_count(server, [*FOX, spelled, *FOX])
        with pytest.raises(anthropic.BadRequestError, match="always thinks"):
            create(server, thinking={"type": "disabled"})


def langchain_chat(server, **options):
    kind = pytest.importorskip("langchain_anthropic").ChatAnthropic
    fields = {"temperature": 0, **options.pop("model_kwargs", {})}
    given = {
        "model": "tiny",
        "base_url": server.url,
        "api_key": "none",
        "max_retries": 0,
        "max_tokens": 12,
        **options,
    }
    return kind(**given, model_kwargs={"extra_body": fields})


def test_langchain_streams_what_it_invokes(server):
    model = langchain_chat(server)
    answer = model.invoke("the quick brown fox")
    assert answer.content == create(server).content[0].text
    whole = None
    for chunk in model.stream("the quick brown fox"):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == answer.content
    counts = [message.usage_metadata for message in (whole, answer)]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"] == count(server)
    assert counts[0]["output_tokens"] == counts[1]["output_tokens"] == 12
    assert whole.response_metadata["stop_reason"] == answer.response_metadata["stop_reason"] == "max_tokens"


def test_langchain_tools_and_structured_output(server):
    pytest.importorskip("llguidance")
    from langchain_core.messages import HumanMessage, ToolMessage
    from pydantic import BaseModel

    class Clock(BaseModel):
        """The time somewhere."""

        hour: int

    model = langchain_chat(server, max_tokens=150)
    called = model.bind_tools([Clock], tool_choice="Clock").invoke("what time is it?")
    (call,) = called.tool_calls
    assert call["name"] == "Clock"
    assert isinstance(call["args"]["hour"], int)
    history = [HumanMessage("what time is it?"), called, ToolMessage("noon", tool_call_id=call["id"])]
    assert model.bind_tools([Clock]).invoke(history).usage_metadata["input_tokens"] > 0
    for method in ("function_calling", "json_schema"):
        made = model.with_structured_output(Clock, method=method).invoke("what time is it?")
        assert isinstance(made, Clock)
