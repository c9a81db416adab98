"""prepare_chat: what OpenAI's chat options mean to the engine. Adapters and the server read them here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.errors import RequestRejectedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.tokenization import ChatTokenizer, needed
from paged_backend.toolcalls.formats import ToolFormat, tool_format_for
from paged_backend.toolcalls.grammar import FORCED, tool_outputs
from paged_backend.toolcalls.messages import normalize_tools
from paged_backend.toolcalls.parser import ParsedReply, ToolCallParser, parse_reply
from paged_backend.toolcalls.prompt import chat_prompt
from paged_backend.toolcalls.response_format import response_outputs

CHAT_OPTIONS = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "add_generation_prompt",
    "continue_final_message", "chat_template", "add_special_tokens", "split_special_tokens",
)  # fmt: skip
"""Keywords of :func:`prepare_chat` that adapters take with each call, beside ``chat_template_kwargs``."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat ready for ``engine.submit(call.prompt, call.params)``.

    tool_format: how tool calls stand in the reply's text; None where no tools were offered and text is just text.
    """

    prompt: dict[str, Any]
    params: SamplingParams
    tool_format: ToolFormat | None = None

    def parse(self, text: str, finish_reason: str | None) -> ParsedReply:
        """The reply's content and tool calls."""
        if self.tool_format is None:
            return ParsedReply(text)
        return parse_reply(self.tool_format, text, truncated=finish_reason == "length")

    def parser(self) -> ToolCallParser | None:
        """For a reply that comes in pieces; None where its text is its content."""
        return None if self.tool_format is None else ToolCallParser(self.tool_format)


def prepare_chat(
    tokenizer: ChatTokenizer | None,
    messages: Sequence[Any],
    params: SamplingParams,
    *,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    response_format: Mapping[str, Any] | None = None,
    **prompt_options: Any,
) -> ChatCall:
    """messages, tools, tool_choice, parallel_tool_calls and response_format are OpenAI's, in every form it accepts.

    prompt_options: those of :func:`chat_prompt`. With tools that may be called, ``params.structured_outputs`` may be
    JSON only: what the reply is if it calls nothing. Raises ``RequestRejectedError``, naming the field, for what cannot
    be honoured.
    """
    offered = normalize_tools(tools)
    choice, allowed = _choice(tool_choice, bool(offered))
    if allowed is not None:
        names = [tool["function"]["name"] for tool in offered]
        for name in allowed:
            if name not in names:
                raise RequestRejectedError(
                    f"tool_choice {name!r:.80} is none of the tools: {', '.join(names)}"
                )
        offered = [tool for tool in offered if tool["function"]["name"] in allowed]
    if choice == "none":
        offered = []
    wanted = response_outputs(response_format)
    if wanted is not None and params.structured_outputs is not None:
        raise RequestRejectedError("response_format and structured_outputs exclude each other")
    if wanted is None and params.structured_outputs is not None:
        wanted = StructuredOutputs.coerce(params.structured_outputs)
    tokenizer = needed(tokenizer)
    tool_format = tool_format_for(tokenizer, prompt_options.get("chat_template"))
    prompt = chat_prompt(tokenizer, messages, offered, tool_format, **prompt_options)
    if not offered:
        return ChatCall(prompt, replace(params, structured_outputs=wanted))
    # a reply that must be a call has no text to hold to anything
    schema = _schema(wanted) if wanted is not None and choice == "auto" else None
    outputs = tool_outputs(
        tool_format,
        offered,
        choice,
        parallel=parallel_tool_calls,
        response_schema=schema,
        response_strict=wanted is not None and wanted.strict,
    )
    skip = params.skip_special_tokens and tool_format.skip_special_tokens
    params = replace(params, structured_outputs=outputs, skip_special_tokens=skip)
    return ChatCall(prompt, params, tool_format)


def _choice(choice: Any, offered: bool) -> tuple[str, list[str] | None]:
    """(``auto``, ``none``, ``required`` or the name of a tool; names of the tools that may be called, None for all)."""
    allowed: list[str] | None = None
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        function = choice.get("function", choice)
        if kind == "allowed_tools":
            inner = choice.get("allowed_tools", choice)
            tools = inner.get("tools") if isinstance(inner, Mapping) else None
            if not isinstance(tools, Sequence) or not tools or not all(isinstance(t, Mapping) for t in tools):
                raise RequestRejectedError("tool_choice of type allowed_tools needs a list of tools")
            allowed = [tool.get("function", tool).get("name") for tool in tools]
            choice = inner.get("mode", "auto")
        elif kind in ("auto", "none", "any", "required"):
            choice = kind
        elif isinstance(function, Mapping) and isinstance(function.get("name"), str):
            choice = function["name"]
    if choice is None or choice == "":
        choice = "auto"
    if isinstance(choice, bool):
        choice = "required" if choice else "none"
    if choice in FORCED:
        choice = "required"
    if not isinstance(choice, str):
        raise RequestRejectedError(
            f"tool_choice must be auto, none, required or the name of a tool, got {choice!r:.80}"
        )
    if not offered and choice not in ("auto", "none"):
        raise RequestRejectedError(f"tool_choice is {choice!r:.80}, but no tools were given")
    return choice, allowed


def _schema(wanted: StructuredOutputs) -> Mapping[str, Any]:
    if wanted.json_object:
        return {"type": "object"}
    if wanted.json is None:
        raise RequestRejectedError("structured_outputs with tools must be json or json_object")
    schema: Mapping[str, Any] = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
    return schema
