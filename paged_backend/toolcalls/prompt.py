"""From messages and tools to a prompt: by the chat template, which learns of tools from us if it knows none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.text.chat_template import plain_data, tool_schema
from paged_backend.toolcalls.formats import ToolFormat

_INTRODUCTION = """You can call functions to do what you are asked. These are the functions, as JSON schemas:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON, like this:
<tool_call>
{{"name": "the name", "arguments": {{"argument": "value"}}}}
</tool_call>
You will then be given the result between <tool_response> and </tool_response>."""


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_format: ToolFormat,
    **template_options: Any,
) -> dict[str, Any]:
    """A prompt for ``engine.submit``: the text and its token ids, with the special tokens that the template wrote.

    messages: in OpenAI's form, tool calls and tool results included. tools: in OpenAI's form. Raises
    ``RequestRejectedError`` for what the template refuses.
    """
    for index, message in enumerate(messages):
        if (
            isinstance(message, Mapping)
            and message.get("content") is None
            and message.get("role") != "assistant"
        ):
            raise RequestRejectedError(f"message {index} has no 'content', only {list(message)}")
    if tool_format.native:
        chat = [_nine(message) for message in messages] if tool_format.name == "mistral" else list(messages)
        text = tokenizer.apply_chat_template(chat, tools=tools or None, **template_options)
    else:
        text = tokenizer.apply_chat_template(_spelled_out(messages, tools), **template_options)
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _spelled_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The conversation in system, user and assistant messages only, tools and calls as text."""
    chat: list[dict[str, Any]] = []
    results = False
    for message in messages:
        role, content = message.get("role"), _text(message.get("content"))
        if role == "tool":
            answer = f"<tool_response>\n{content}\n</tool_response>"
            if results:  # results of parallel calls are one answer
                chat[-1]["content"] += "\n" + answer
            else:
                chat.append({"role": "user", "content": answer})
            results = True
            continue
        results = False
        calls = message.get("tool_calls")
        if calls:
            written = "\n".join(_call(call) for call in calls)
            chat.append({"role": role, "content": f"{content}\n{written}" if content else written})
        else:
            chat.append({**message, "content": message.get("content") or ""})
    if tools:
        schemas = [plain_data(tool_schema(tool)) for tool in tools]
        listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        introduction = _INTRODUCTION.format(tools=listed)
        if chat and chat[0].get("role") in ("system", "developer"):
            chat[0] = {**chat[0], "content": f"{_text(chat[0]['content'])}\n\n{introduction}"}
        else:
            chat.insert(0, {"role": "system", "content": introduction})
    return chat


def _text(content: Any) -> str:
    """Text of a message's content, which may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, str) else part.get("text", "") for part in content]
    return "\n".join(part for part in parts if part)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name", ""), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _nine(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose call ids have the nine letters and digits that Mistral's templates insist on."""

    def nine(index: Any) -> str:
        text = str(index)
        return text if len(text) == 9 and text.isalnum() else hashlib.blake2b(text.encode()).hexdigest()[:9]

    copy = dict(message)
    if copy.get("tool_call_id"):
        copy["tool_call_id"] = nine(copy["tool_call_id"])
    if copy.get("tool_calls"):
        copy["tool_calls"] = [{**call, "id": nine(call.get("id", ""))} for call in copy["tool_calls"]]
    return copy
