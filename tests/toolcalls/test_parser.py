"""Tool calls read from text, whole and in pieces of any size."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.text.pieces import Pieces
from paged_backend.toolcalls import ToolCallParser, parse_reply
from paged_backend.toolcalls.formats import HERMES, LLAMA3, MISTRAL

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": null}]}}\n</tool_call>'
ARGS = {"a": 'x}"{', "b": [1, {"c": None}]}

CASES = [
    (HERMES, "just text", "just text", [], 0),
    (HERMES, "a < b and <tool", "a < b and <tool", [], 0),
    (HERMES, "  spaced  text \n", "  spaced  text \n", [], 0),
    (HERMES, ONE, "", [("f", ARGS)], 0),
    (HERMES, f"I will look.\n\n{ONE}\n", "I will look.", [("f", ARGS)], 0),
    (HERMES, f"{ONE}\n{ONE}\nDone.", "Done.", [("f", ARGS)] * 2, 0),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", {"x": 1})], 0),
    (HERMES, '<tool_call>{"name": "g"}</tool_call>', "", [("g", {})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("g", {"x": 1})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [("g", {})], 0),
    (HERMES, '<tool_call>{"name": "g", "parameters": {"x": 1}}</tool_call>', "", [("g", {"x": 1})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"t": "</tool_call>"}}</tool_call>', "",
     [("g", {"t": "</tool_call>"})], 0),
    (HERMES, '<tool_call>\n{"name": "查询", "arguments": {"q": "你好 ü 🙂"}}\n</tool_call>', "",
     [("查询", {"q": "你好 ü 🙂"})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": 1}}', "", [("g", {"x": 1})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": 1}}<tool_call>{"name": "h", "arguments": {}}', "",
     [("g", {"x": 1}), ("h", {})], 0),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": 1', "", [], 1),
    (HERMES, "<tool_call>not json</tool_call> after", "after", [], 1),
    (HERMES, "<tool_call>{'name': 'g'}</tool_call>", "", [], 1),
    (HERMES, '<tool_call>{"name": "g", "arguments": [1]}</tool_call>', "", [], 1),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "", [], 1),
    (LLAMA3, '{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})], 0),
    (LLAMA3, '\n {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", {"x": 1}), ("g", {})], 0),
    (LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})], 0),
    (LLAMA3, "text first", "text first", [], 0),
    (LLAMA3, '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', [], 0),
    (LLAMA3, '{"type": "x"}', '{"type": "x"}', [], 0),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", {"x": 1}), ("g", {})], 0),
    (MISTRAL, 'Sure.[TOOL_CALLS][{"name": "f", "arguments": {"x": [1, 2]}, "id": "abc"}]', "Sure.",
     [("f", {"x": [1, 2]})], 0),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "", [("f", {"x": 1}), ("g", {})], 0),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": {"y": 1}, "z": [{"y": 2}]}', "", [("f", {"x": {"y": 1}, "z": [{"y": 2}]})], 0),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}', "", [("f", {"x": 1})], 0),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": ', "", [], 1),
    (MISTRAL, "[TOOL_CALLS]f", "", [], 1),
    (MISTRAL, "[TOOL", "[TOOL", [], 0),
]  # fmt: skip


def pieces(text, cuts):
    points = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(points)]


def check(reply, content, calls, invalid):
    assert reply.content == content
    assert [(call.name, call.parsed) for call in reply.calls] == calls
    assert len(reply.invalid) == invalid


@pytest.mark.parametrize(("tool_format", "text", "content", "calls", "invalid"), CASES)
def test_whole(tool_format, text, content, calls, invalid):
    check(parse_reply(tool_format, text), content, calls, invalid)


@pytest.mark.parametrize(("tool_format", "text", "content", "calls", "invalid"), CASES)
def test_character_by_character_is_the_same(tool_format, text, content, calls, invalid):
    check(stream(tool_format, list(text)).reply, content, calls, invalid)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=8))
def test_any_cutting_is_the_same(case, cuts):
    tool_format, text, content, calls, invalid = case
    check(stream(tool_format, pieces(text, cuts)).reply, content, calls, invalid)


def stream(tool_format, parts):
    """Push the parts and check that the deltas add up to the reply."""
    parser = ToolCallParser(tool_format)
    deltas = [parser.push(part) for part in parts]
    deltas.append(parser.finish())
    assert "".join(delta.content for delta in deltas) == parser.reply.content
    names, arguments, ids = {}, {}, {}
    for delta in deltas:
        for call in delta.calls:
            if call.name is not None:
                assert call.index not in names
                assert not call.arguments
                names[call.index], ids[call.index] = call.name, call.id
            else:
                assert call.id is None
                arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert list(names) == list(range(len(names)))
    if not parser.reply.invalid:
        assert [(ids[i], names[i], arguments.get(i, "")) for i in names] == [
            (call.id, call.name, call.arguments) for call in parser.reply.calls
        ]
    return parser


def test_arguments_come_while_they_are_written():
    parser = ToolCallParser(HERMES)
    assert not parser.push('<tool_call>\n{"name": "f')
    (first,) = parser.push('", "arguments": ').calls
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert [d.arguments for d in parser.push('{"city": "Par').calls] == ['{"city": "Par']
    assert [d.arguments for d in parser.push('is"}').calls] == ['is"}']
    assert not parser.push("}\n</tool_call>").calls
    assert parser.reply.calls[0].parsed == {"city": "Paris"}


def test_text_is_held_back_only_while_it_may_begin_a_call():
    parser = ToolCallParser(HERMES)
    assert parser.push("a <").content == "a"
    assert parser.push("b").content == " <b"
    assert parser.push("<tool_cal").content == ""
    assert parser.push("led").content == "<tool_called"


def test_a_truncated_call_is_invalid_and_says_so():
    reply = parse_reply(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', truncated=True)
    assert reply.calls == []
    assert (reply.invalid[0].name, reply.invalid[0].arguments) == ("f", '{"a": 1')
    assert "max_tokens" in reply.invalid[0].error


@pytest.mark.parametrize("size", range(len(ONE)))
def test_cut_anywhere_streaming_and_whole_agree(size):
    text = ONE[:size]
    streamed = stream(HERMES, list(text)).reply
    whole = parse_reply(HERMES, text)
    assert [c.name for c in streamed.calls] == [c.name for c in whole.calls]
    assert len(streamed.invalid) == len(whole.invalid)
    for reason in ("length", "stop"):
        assert whole.finish_reason(reason) == ("tool_calls" if whole.calls and reason == "stop" else reason)


def test_ids_are_unique_and_mistral_s_have_nine_letters_or_digits():
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
    ids = [call.id for call in parse_reply(MISTRAL, text).calls]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)


@given(st.text(max_size=60))
def test_any_text_is_taken_without_an_error(text):
    for tool_format in (HERMES, LLAMA3, MISTRAL):
        for prefix in ("", tool_format.start, tool_format.start + '{"name": "f", "arguments": {'):
            stream(tool_format, list(prefix + text))


@given(st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
), max_size=3), st.booleans())  # fmt: skip
def test_any_arguments_survive(arguments, ascii_only):
    written = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    reply = stream(HERMES, list(f"<tool_call>\n{written}\n</tool_call>")).reply
    assert [call.parsed for call in reply.calls] == [arguments]


LONG = 30_000
STREAMS = {
    "arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * LONG + '"}}</tool_call>'),
    "escapes": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (LONG // 2) + '"}}</tool_call>',
    ),
    "numbers": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": [' + "1," * (LONG // 2) + "1]}}</tool_call>",
    ),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": "' + "x" * LONG + '"}, "name": "f"}</tool_call>',
    ),
    "text of JSON": (HERMES, '<tool_call>{"name": "f", "arguments": "' + "x" * LONG + '"}</tool_call>'),
    "many calls": (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * (LONG // 48)),
    "content": (HERMES, "words < of < text " * (LONG // 18)),
    "space": (HERMES, "a" + " " * LONG + "b"),
    "space first": (LLAMA3, " " * LONG + "b"),
    "space between": (LLAMA3, '{"name": "f", "parameters": {}}' + " ;" * (LONG // 2)),
    "no JSON": (HERMES, "<tool_call>" + "x" * LONG + "</tool_call> after"),
    "no JSON, no end": (HERMES, "<tool_call>" + "<" * LONG),
    "no call": (LLAMA3, '{"answer": "' + "x" * LONG + '"}'),
    "Mistral": (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": {"b": "' + "x" * LONG + '"}}'),
    "a name without end": (MISTRAL, "[TOOL_CALLS]" + "x" * LONG),
}


@pytest.mark.parametrize("size", [1, 7, 1000, 10 * LONG])
@pytest.mark.parametrize("name", STREAMS)
def test_work_is_linear_in_the_length_of_the_stream(name, size, monkeypatch):
    """Copies are counted: where pieces are joined, and what stands in strings that the next piece is added to."""
    tool_format, text = STREAMS[name]
    joined = 0
    whole = Pieces.__str__

    def count(self):
        nonlocal joined
        joined += sum(map(len, self._parts)) if len(self._parts) > 1 else 0
        return whole(self)

    monkeypatch.setattr(Pieces, "__str__", count)
    parser = ToolCallParser(tool_format)
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
        held = [part for part in (parser, parser._scanner, parser._sought) if part is not None]
        for part in held:
            for attribute in vars(part).values():
                assert not isinstance(attribute, str) or len(attribute) <= 4200
    parser.finish()
    assert parser.reply.content or parser.reply.calls or parser.reply.invalid
    assert joined <= 4 * len(text)
