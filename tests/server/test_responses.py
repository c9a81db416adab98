"""/v1/responses through the official client."""

from __future__ import annotations

import json

import openai
import pytest

CLOCK = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]},
}


def create(server, **options):
    return server.client().responses.create(
        **{
            "model": "tiny",
            "input": "the quick brown fox",
            "max_output_tokens": 12,
            "temperature": 0,
            **options,
        }
    )


def test_text(server):
    answer = create(server, temperature=0, instructions="be brief", metadata={"a": "b"})
    assert answer.object == "response"
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.metadata == {"a": "b"}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]
    chat = server.client().chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content


def test_a_stream_is_a_complete_sequence_of_typed_events(server):
    options = {"temperature": 1, "extra_body": {"seed": 4}}
    whole = create(server, **options)
    events = list(create(server, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage == whole.usage.model_copy(
        update={"input_tokens_details": events[-1].response.usage.input_tokens_details}
    )


def test_the_clients_own_stream_helper_and_parse(server):
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Fox(pydantic.BaseModel):
        jumps: bool

    client = server.client().responses
    parsed = client.parse(model="tiny", input="fox", text_format=Fox, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Fox)
    assert parsed.status == "completed"
    with client.stream(model="tiny", input="fox", text_format=Fox, max_output_tokens=60) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Fox)


def test_function_calls_and_their_results(server):
    pytest.importorskip("llguidance")
    options = {
        "tools": [CLOCK],
        "tool_choice": "required",
        "max_output_tokens": 100,
        "extra_body": {"seed": 2},
    }
    answer = create(server, **options)
    (call,) = answer.output
    assert call.type == "function_call"
    assert answer.status == call.status == "completed"
    assert json.loads(call.arguments)["zone"] in ("utc", "cet")
    events = list(create(server, stream=True, **options))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "what time is it?"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    assert create(server, input=history, tools=[CLOCK]).output


def test_logprobs(server):
    answer = create(server, include=["message.output_text.logprobs"], top_logprobs=2)
    found = answer.output[0].content[0].logprobs
    assert len(found) == 12
    assert all(len(item.top_logprobs) == 2 for item in found)
    events = create(server, include=["message.output_text.logprobs"], stream=True)
    assert sum(len(event.logprobs) for event in events if event.type == "response.output_text.delta") == 12


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.call_id"),
        ({"input": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_is_not_supported_is_named(server, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, **options)
    assert caught.value.param == param


def test_an_error_in_the_middle_is_an_event(server):
    client = server.serving.client
    with server.hold() as gate:
        gate.allow()
        stream = create(server, stream=True, max_output_tokens=900, extra_body={"ignore_eos": True})
        next(stream)
        remote = next(iter(client._requests.values()))
        server.server._loop.call_soon_threadsafe(client._take, remote, {
            "outputs": [], "error": {"kind": "failed", "message": "the model broke"},
        })  # fmt: skip
        try:
            last = list(stream)[-1]
            message = last.message
            assert last.type == "error"
        except openai.APIError as error:  # what clients make of the event has changed with their versions
            message = error.message
        assert message == "the model broke"
        server.server._loop.call_soon_threadsafe(client.send, {"t": "abort", "id": remote.number})
