"""Tools for LlamaIndex: what ``FunctionCallingLLM`` leaves to its subclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.tools.types import BaseTool


class ToolCalling:
    """Mixed in before ``FunctionCallingLLM``, whose ``chat_with_tools`` family builds on these."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(
                ChatMessage(role=MessageRole.USER, content=user_msg)
                if isinstance(user_msg, str)
                else user_msg
            )
        offered = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        prepared: dict[str, Any] = {"messages": messages, **kwargs}
        if offered:
            prepared["tools"] = offered
            prepared["tool_choice"] = tool_choice or ("required" if tool_required else "auto")
            prepared["parallel_tool_calls"] = allow_parallel_tool_calls
        return prepared

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        extra, message = response.message.additional_kwargs, response.message
        if not allow_parallel_tool_calls and len(extra.get("tool_calls") or ()) > 1:
            extra["tool_calls"] = extra["tool_calls"][:1]
            calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)][:1]
            message.blocks = [*(b for b in message.blocks if isinstance(b, TextBlock)), *calls]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of a response; of one that is still streaming, with the arguments there are so far."""
        selections = []
        for call in response.message.additional_kwargs.get("tool_calls") or ():
            function = call["function"]
            try:
                arguments = parse_partial_json(function["arguments"]) if function["arguments"] else {}
            except ValueError:
                arguments = {}
            selections.append(
                ToolSelection(
                    tool_id=call["id"],
                    tool_name=function["name"],
                    tool_kwargs=arguments if isinstance(arguments, dict) else {},
                )
            )
        if not selections and error_on_no_tool_call:
            raise ValueError(f"the model called no tool; it said: {response.message.content!r}")
        return selections
