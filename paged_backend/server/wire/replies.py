"""What an answer may call and must look like, and the taking apart of what came: for chats and responses alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.outputs import CompletionOutput
from paged_backend.server.wire.errors import ApiError
from paged_backend.toolcalls import (
    ReplyDelta,
    ToolCallDelta,
    ToolCallParser,
    ToolFormat,
    tool_format_for,
    tool_outputs,
)


@dataclass(frozen=True)
class Form:
    """tools: in OpenAI's chat form, those the model is told of. structured: what the engine holds it to."""

    tool_format: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    structured: StructuredOutputs | Mapping[str, Any] | None

    @property
    def skip_special_tokens(self) -> bool | None:
        """False where the marks of calls are special tokens, which the parser must see."""
        return False if self.tools and not self.tool_format.skip_special_tokens else None

    def reply(self) -> Reply:
        return Reply(self.tool_format if self.tools else None)


def form_of(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    parallel: bool | None,
    structured: Mapping[str, Any] | None,
) -> Form:
    """Raises :class:`ApiError` or ``ValueError`` for tools and choices that make no sense.

    structured: what the request asks of its text, as the engine understands it.
    """
    tool_format = tool_format_for(tokenizer)
    choice = _choice(tool_choice, tools)
    if not tools or choice == "none":
        return Form(tool_format, (), structured)
    for number, tool in enumerate(tools):
        _check_tool(number, tool)
    schema: Mapping[str, Any] | None = None
    if structured is not None:
        if choice != "auto":
            structured = None  # a reply that must be a call has no text to hold to anything
        elif structured.get("json_object"):
            schema = {"type": "object"}
        elif structured.get("json") is not None:
            schema = structured["json"]
        else:
            raise _bad("structured_outputs", "with tools must be json or json_object")
    made = tool_outputs(tool_format, tools, choice, parallel=parallel, response_schema=schema)
    return Form(tool_format, tools, made)


def _choice(given: Any, tools: Sequence[Any] | None) -> str:
    if tools is not None and not tools:
        raise _bad("tools", "must have at least one tool, or be left out")
    if given is None:
        return "auto"
    if not tools and given != "none":
        raise _bad("tool_choice", "needs tools")
    if given in ("none", "auto", "required"):
        return str(given)
    if isinstance(given, Mapping) and given.get("type") == "function":
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise _bad("tool_choice", "must be none, auto, required or {type: function, function: {name}}")


def _check_tool(number: int, tool: Mapping[str, Any]) -> None:
    place = f"tools.{number}"
    if tool.get("type") != "function":
        raise _bad(place, f"must be of type function, got {tool.get('type')!r:.60}")
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _bad(place, "must have a function with a name")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise _bad(place, "has parameters that are not a JSON schema")


def _bad(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param} {problem}", param=param, code="invalid_value")


class Reply:
    """One choice while it comes: plain text, or text and calls. Streams and whole answers are made of the same deltas.

    ``content`` and ``calls`` (complete deltas, one per call) are what has come so far.
    """

    def __init__(self, tool_format: ToolFormat | None) -> None:
        self.content = ""
        self.calls: list[ToolCallDelta] = []
        self.finish_reason: str | None = None
        self._parser = ToolCallParser(tool_format) if tool_format is not None else None

    def push(self, output: CompletionOutput) -> ReplyDelta:
        """Take in what is new; returns what of it is certain, with at most one delta per call."""
        parser = self._parser
        if parser is None:
            self.content += output.text
            self.finish_reason = output.finish_reason
            return ReplyDelta(output.text)
        pieces = [parser.push(output.text)]
        if output.finished:
            pieces.append(parser.finish(output.finish_reason == "length"))
            lost = [call.arguments for call in parser.reply.invalid if call.name is None]
            pieces.append(
                ReplyDelta("".join(lost))
            )  # calls that are none: their text is all there is to give
            self.finish_reason = parser.reply.finish_reason(output.finish_reason)
        delta = ReplyDelta("".join(piece.content for piece in pieces))
        delta.calls = _one_each([call for piece in pieces for call in piece.calls])
        self.content += delta.content
        self.calls = _one_each([*self.calls, *delta.calls])
        return delta


def _one_each(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    merged: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        first = merged.get(delta.index)
        if first is not None:
            delta = ToolCallDelta(
                delta.index, first.id or delta.id, first.name or delta.name, first.arguments + delta.arguments
            )
        merged[delta.index] = delta
    return list(merged.values())
