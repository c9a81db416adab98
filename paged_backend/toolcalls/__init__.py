"""Tool calls: how a model is told of tools, held to their form, and understood. For every adapter and the server."""

from paged_backend.toolcalls.chat import CHAT_OPTIONS, ChatCall, prepare_chat
from paged_backend.toolcalls.formats import ToolFormat, tool_format_for
from paged_backend.toolcalls.grammar import tool_outputs
from paged_backend.toolcalls.parser import (
    InvalidToolCall,
    ParsedReply,
    ReplyDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    parse_reply,
)
from paged_backend.toolcalls.prompt import chat_prompt
from paged_backend.toolcalls.reasoning import ReasoningParser, reasoning_options, reasoning_parser_for
from paged_backend.toolcalls.response_format import response_outputs

__all__ = [
    "CHAT_OPTIONS",
    "ChatCall",
    "InvalidToolCall",
    "ParsedReply",
    "ReasoningParser",
    "ReplyDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolFormat",
    "chat_prompt",
    "parse_reply",
    "prepare_chat",
    "reasoning_options",
    "reasoning_parser_for",
    "response_outputs",
    "tool_format_for",
    "tool_outputs",
]
