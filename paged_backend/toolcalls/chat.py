"""prepare_chat: what OpenAI's chat options mean to the engine. Adapters and the server read them here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.errors import RequestRejectedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.toolcalls.formats import ToolFormat, tool_format_for
from paged_backend.toolcalls.grammar import FORCED, tool_outputs
from paged_backend.toolcalls.parser import ParsedReply, ToolCallParser, parse_reply
from paged_backend.toolcalls.prompt import chat_prompt


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
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    response_format: Mapping[str, Any] | None = None,
    **template_options: Any,
) -> ChatCall:
    """messages, tools, tool_choice, parallel_tool_calls and response_format are OpenAI's, in every form it accepts.

    template_options go to the chat template. Raises ``RequestRejectedError`` for what cannot be honoured.
    """
    choice = _choice(tool_choice, bool(tools))
    schema, free_json = _response(response_format)
    offered = list(tools or ()) if choice != "none" else []
    tool_format = tool_format_for(tokenizer, template_options.get("chat_template"))
    prompt = chat_prompt(tokenizer, messages, offered, tool_format, **template_options)
    outputs = params.structured_outputs
    if outputs is not None and response_format is not None and (schema is not None or free_json):
        raise RequestRejectedError("give structured_outputs or response_format, not both")
    if outputs is None and offered:
        if free_json and schema is None:
            schema = {"type": "object"}
        outputs = tool_outputs(
            tool_format, offered, choice, parallel=parallel_tool_calls, response_schema=schema
        )
    elif schema is not None:
        outputs = StructuredOutputs(json=schema)
    elif free_json:
        outputs = StructuredOutputs(json_object=True)
    if not offered:
        return ChatCall(prompt, replace(params, structured_outputs=outputs))
    skip = params.skip_special_tokens and tool_format.skip_special_tokens
    return ChatCall(
        prompt, replace(params, structured_outputs=outputs, skip_special_tokens=skip), tool_format
    )


def _choice(choice: Any, offered: bool) -> str:
    """``auto``, ``none``, ``required`` or the name of a tool."""
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        function = choice.get("function", choice)
        if kind in ("auto", "none", "any", "required"):
            choice = kind
        elif isinstance(function, Mapping) and isinstance(function.get("name"), str):
            choice = function["name"]
    if choice is None or choice == "" or choice is False:
        return "auto" if choice is None or choice == "" else "none"
    if choice is True or choice in FORCED:
        choice = "required"
    if not isinstance(choice, str):
        raise RequestRejectedError(
            f"tool_choice must be auto, none, required or the name of a tool, got {choice!r}"
        )
    if not offered and choice not in ("auto", "none"):
        raise RequestRejectedError(f"tool_choice is {choice!r}, but no tools were given")
    return choice


def _response(wanted: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """(schema, whether any JSON object is asked for)."""
    if wanted is None:
        return None, False
    kind = wanted.get("type")
    if kind == "text":
        return None, False
    if kind == "json_object":
        return None, True
    if kind == "json_schema":
        holder = wanted.get("json_schema", wanted)
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if isinstance(schema, Mapping):
            return dict(schema), False
        raise RequestRejectedError("response_format of type json_schema needs json_schema.schema")
    raise RequestRejectedError(f"response_format.type must be text, json_object or json_schema, got {kind!r}")
