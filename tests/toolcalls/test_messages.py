"""Messages as clients send them, and what a chat template is given of them."""

from __future__ import annotations

import pytest

from paged_backend.errors import RequestRejectedError
from paged_backend.testing import CHATML, small_tokenizer
from paged_backend.text.chat_template import ChatTemplate
from paged_backend.toolcalls import chat_prompt
from paged_backend.toolcalls.messages import normalize_messages, normalize_tools

USER = {"role": "user", "content": "time?"}
# how templates write the arguments of calls: as they come, as JSON, one by one
AS_TEXT = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% set call = call.function %}"
    '<tool_call>{"name": "{{ call.name }}", "arguments": '
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}}"
    "{% endfor %}{% endfor %}{# tools #}"
)
ONE_BY_ONE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor %};{% endfor %}"
    "{% endfor %}{# tools #}"
)


def call(arguments="{}", **fields):
    return {
        "id": "c",
        "type": "function",
        "function": {"name": "now", "arguments": arguments},
        **fields,
    }


def calling(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


@pytest.mark.parametrize("arguments", ["", "  ", "\n", None, "null", "{}", " {} ", {}])
def test_arguments_that_are_blank_mean_none(arguments):
    chat = [USER, calling(call(arguments))]
    assert '"arguments": {}}' in ChatTemplate(AS_TEXT).render(chat)
    assert ChatTemplate(ONE_BY_ONE).render(chat) == "<tool_call>now;"
    for template in (AS_TEXT, ONE_BY_ONE, CHATML):
        text = chat_prompt(small_tokenizer(chat_template=template), chat)["prompt"]
        assert '"arguments": {}}' in text or "now;" in text


def test_arguments_that_are_left_out_mean_none():
    bare = {"id": "c", "type": "function", "function": {"name": "now"}}
    assert normalize_messages([USER, calling(bare)])[1]["tool_calls"] == [call({})]
    assert ChatTemplate(ONE_BY_ONE).render([calling(bare)]) == "<tool_call>now;"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ' {"a":1}\n'])
def test_arguments_may_be_an_object_or_its_text(arguments):
    assert normalize_messages([USER, calling(call(arguments))])[1]["tool_calls"] == [call({"a": 1})]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "7", "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_the_model_wrote_them(arguments):
    chat = [USER, calling(call(arguments))]
    for template in (AS_TEXT, CHATML):
        text = chat_prompt(small_tokenizer(chat_template=template), chat)["prompt"]
        assert f'"arguments": {arguments}}}' in text
    text = chat_prompt(small_tokenizer(chat_template=ONE_BY_ONE), chat)["prompt"]
    assert text == f"<tool_call>now<arguments>{arguments};"


def test_what_the_caller_gave_stays_as_it_was():
    given = [calling(call("")), {"role": "tool", "content": None}]
    normalize_messages(given)
    assert given == [calling(call("")), {"role": "tool", "content": None}]


def test_results_without_an_id_answer_the_open_calls_in_their_order():
    chat = [
        calling(call(id="a"), call(id="b", function={"name": "then", "arguments": ""}), call(id=None)),
        {"role": "tool", "content": "by name", "name": "then"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "unknown", "tool_call_id": "gone"},
        {"role": "tool", "content": "made up"},
    ]
    found = normalize_messages(chat)
    assert [(m["tool_call_id"], m.get("name")) for m in found[1:]] == [
        ("b", "then"),
        ("a", "now"),
        ("gone", None),
        ("call_0_2", "now"),
    ]
    assert found[0]["tool_calls"][2]["id"] == "call_0_2"


def test_a_result_of_nothing_needs_an_id():
    with pytest.raises(RequestRejectedError, match=r"^messages\.1\.tool_call_id is missing"):
        normalize_messages([USER, {"role": "tool", "content": "x"}])


def test_the_older_form_of_calls_is_understood():
    chat = [
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": ""}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    assert normalize_messages(chat) == [
        {"role": "assistant", "content": "", "tool_calls": [call({}, id="call_0_0")]},
        {"role": "tool", "name": "now", "content": "noon", "tool_call_id": "call_0_0"},
    ]
    assert normalize_messages([{"role": "function", "name": "f", "content": "x"}])[0]["tool_call_id"]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": ["a", {"text": "b"}]}, "a\nb"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "a"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ],
)
def test_content_in_every_form(message, content):
    tokenizer = small_tokenizer(chat_template="{{ messages[0].content }}{# tools <tool_call> #}")
    assert chat_prompt(tokenizer, [message])["prompt"] == content


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("hello", "messages.0 must"),
        ({"content": "x"}, "messages.0.role must"),
        ({"role": 3, "content": "x"}, "messages.0.role must"),
        ({"role": "user"}, "messages.0.content is missing"),
        ({"role": "system", "content": None}, "messages.0.content is missing"),
        ({"role": "user", "content": 1}, "messages.0.content must"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages.0.content has a part of type 'image_url'",
        ),
        ({"role": "user", "content": [3]}, "messages.0.content has a part of type 'int'"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content has a text part without"),
        ({"role": "user", "content": "x", "name": 1}, "messages.0.name must"),
        ({"role": "assistant", "tool_calls": "f"}, "messages.0.tool_calls must"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages.0.tool_calls must"),
    ],
)
def test_what_cannot_be_understood_is_named(message, place):
    with pytest.raises(RequestRejectedError) as caught:
        normalize_messages([message])
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("messages", [[], None, "hello", {"role": "user", "content": "x"}])
def test_messages_that_are_no_list_of_any(messages):
    with pytest.raises(RequestRejectedError, match=r"^messages must be a list"):
        normalize_messages(messages)


def test_calls_reach_templates_that_know_them_by_the_missing_content():
    template = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for content in (None, "", []):
        assert ChatTemplate(template).render(normalize_messages([calling(call(), content=content)])) == "now"


def test_tools_in_every_form_become_the_one_of_the_chat_api():
    def now(zone: str) -> str:
        """The time.

        Args:
            zone: where
        """
        return zone

    inner = {"name": "f", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": inner}
    flat = {"type": "function", **inner, "strict": None}
    assert normalize_tools([whole, inner, flat]) == [whole] * 3
    assert normalize_tools([now])[0]["function"]["parameters"]["required"] == ["zone"]
    assert normalize_tools(None) == normalize_tools([]) == []


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "function"},
        {"function": {"name": ""}},
        {"name": "a", "parameters": 1},
    ],
)
def test_tools_that_are_none_are_named(tool):
    with pytest.raises(RequestRejectedError, match=r"^tools\.1 "):
        normalize_tools([{"name": "f"}, tool])
