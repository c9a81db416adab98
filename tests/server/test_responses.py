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
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "last"}, "truncation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["else"]}, "include"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input.0.call_id"),
        ({"input": []}, "input"),
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


# --- what is kept ---------------------------------------------------------------------------------------------------


def prompt_text(server, answer):
    """What a conversation with ``answer`` at its end is, as the chat API would be told it."""
    return [
        {"role": "user", "content": "the quick brown fox"},
        {"role": "assistant", "content": answer.output_text},
    ]


def test_a_conversation_goes_on_from_a_response_that_is_kept(server):
    first = create(server, instructions="be brief")
    second = create(server, previous_response_id=first.id, input="and then?", store=True)
    third = create(
        server, previous_response_id=second.id, input=[{"role": "user", "content": "and then?"}], stream=True
    )
    last = list(third)[-1].response
    history = [*prompt_text(server, first), {"role": "user", "content": "and then?"}]
    same = [
        server.client().chat.completions.create(model="tiny", messages=history, max_tokens=12, temperature=0)
    ]
    history += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "and then?"},
    ]
    same.append(
        server.client().chat.completions.create(model="tiny", messages=history, max_tokens=12, temperature=0)
    )
    assert [second.output_text, last.output_text] == [answer.choices[0].message.content for answer in same]
    assert second.previous_response_id == first.id
    assert (second.instructions, second.usage.input_tokens) == (None, same[0].usage.prompt_tokens)
    assert last.usage.input_tokens == same[1].usage.prompt_tokens


def test_calls_and_results_go_on_from_a_response_that_is_kept(server):
    pytest.importorskip("llguidance")
    first = create(server, tools=[CLOCK], tool_choice="required", max_output_tokens=100)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    kept = create(server, previous_response_id=first.id, input=[result], tools=[CLOCK])
    whole = create(
        server, tools=[CLOCK], store=False,
        input=[{"role": "user", "content": "the quick brown fox"}, call.model_dump(exclude_none=True), result],
    )  # fmt: skip
    assert kept.usage.input_tokens == whole.usage.input_tokens
    assert kept.output_text == whole.output_text


def test_a_response_that_is_kept_can_be_looked_at_and_deleted(server):
    client = server.client().responses
    parts = [{"type": "input_text", "text": "two"}]
    answer = create(server, input=[{"role": "user", "content": "one"}, {"role": "user", "content": parts}])
    assert client.retrieve(answer.id) == answer
    items = list(client.input_items.list(answer.id))
    assert [item.content[0].text for item in items] == ["two", "one"]
    assert all(item.id and item.role == "user" for item in items)
    page = client.input_items.list(answer.id, order="asc", limit=1)
    assert ([item.content[0].text for item in page.data], page.has_more) == (["one"], True)
    assert [item.content[0].text for item in page] == ["one", "two"]
    events = list(create(server, stream=True))
    assert client.retrieve(events[-1].response.id) == events[-1].response
    client.delete(answer.id)
    for gone in (
        lambda: client.retrieve(answer.id), lambda: client.delete(answer.id),
        lambda: client.input_items.list(answer.id), lambda: create(server, previous_response_id=answer.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="--max-stored-responses"):
            gone()


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"), ("/input_items?order=up", "order"), ("/input_items?limit=0", "limit"),
        ("/input_items?after=x", "after"), ("/input_items?before=x", "before"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_of_a_kept_response_is_named(server, path, param):
    answer = server.get(f"/v1/responses/{create(server).id}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_nothing_is_kept_that_is_not_to_be(server, start):
    client = server.client().responses
    answer = create(server, store=False)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(answer.id)
    taken = create(server, extra_body={"request_id": "mine"})
    assert taken.id == "resp_mine"
    with pytest.raises(openai.BadRequestError, match="request_id"):
        create(server, extra_body={"request_id": "mine"})
    client.delete(taken.id)
    with start(max_stored_responses=0, served_model_names=("tiny",)) as other:
        answer = create(other)
        with pytest.raises(openai.NotFoundError):
            other.client().responses.retrieve(answer.id)


def test_a_conversation_that_is_too_long_loses_its_first_turns(server):
    words = "seven wizards mind a lazy dog " * 20
    turns = [
        [{"role": "user", "content": f"{number} {words}"}, {"role": "assistant", "content": "so"}]
        for number in range(9)
    ]
    history = [message for turn in turns for message in turn]
    last = {"role": "user", "content": "and then?"}
    options = {"instructions": "be brief", "store": False}
    with pytest.raises(openai.BadRequestError, match="context"):
        create(server, input=[*history, last], **options)
    cut = create(server, input=[*history, last], truncation="auto", **options)
    fits = next(number for number in range(18) if fits_in(server, [*history[2 * number :], last]))
    assert fits > 0
    assert (
        cut.usage.input_tokens
        == create(server, input=[*history[2 * fits :], last], **options).usage.input_tokens
    )
    short = create(server, truncation="auto", **options)
    assert short.usage.input_tokens == create(server, **options).usage.input_tokens


def fits_in(server, messages):
    body = {"messages": [{"role": "system", "content": "be brief"}, *messages]}
    return server.post("/tokenize", body).json()["count"] + 12 <= 1024


THINKER = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)


def test_thoughts_are_items(start):
    pytest.importorskip("llguidance")
    form = {"regex": "[a-z]{3,9} [a-z]{3,9}\n</think>\n\n[a-z]{4,9}"}
    options = {"max_output_tokens": 60, "extra_body": {"structured_outputs": form}}
    with start(chat_template=THINKER, served_model_names=("tiny",)) as server:
        answer = create(
            server, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"], **options
        )
        thoughts, message = answer.output
        assert (thoughts.type, message.type) == ("reasoning", "message")
        assert (thoughts.status, message.status) == ("completed", "completed")
        text = thoughts.content[0].text
        assert len(text.split()) == 2
        assert answer.output_text.isalpha()
        ids = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert answer.usage.output_tokens_details.reasoning_tokens == len(ids)
        events = list(create(server, stream=True, **options))
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
            "completed",
        ]  # fmt: skip
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == text
        assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
            "reasoning", "message",
        ]  # fmt: skip
        assert events[-1].response.output[0].content == thoughts.content
        kept = create(server, previous_response_id=answer.id, input="so?", **options)
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        told = create(
            server, store=False, **options,
            input=[{"role": "user", "content": "the quick brown fox"}, *items, {"role": "user", "content": "so?"}],
        )  # fmt: skip
        spelled = f"<think>{text}</think>{answer.output_text}"
        same = [{"role": "user", "content": "the quick brown fox"}, {"role": "assistant", "content": spelled}]
        count = server.post("/tokenize", {"messages": [*same, {"role": "user", "content": "so?"}]}).json()[
            "count"
        ]
        assert kept.usage.input_tokens == told.usage.input_tokens == count
        with pytest.raises(openai.BadRequestError, match="always thinks"):
            create(server, reasoning={"effort": "none"})
