"""From messages and tools to a prompt: by the chat template, which learns of tools from us if it knows none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.tokenization import ChatTokenizer, needed
from paged_backend.toolcalls.formats import ToolFormat, tool_format_for
from paged_backend.toolcalls.messages import KNOWN_ROLES, normalize_messages, normalize_tools, text_of

Chat = list[dict[str, Any]]
_Render = Callable[[Chat], tuple[str, list[int]]]
_OWN_OPTIONS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "add_special_tokens",
    "split_special_tokens",
)
_PROBE = "paged backend probe"

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
    tokenizer: ChatTokenizer | None,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    tool_format: ToolFormat | None = None,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    split_special_tokens: bool = True,
) -> dict[str, Any]:
    """A prompt for ``engine.submit``: the text and its token ids, with the special tokens that the template wrote.

    messages, tools: in every form that OpenAI's API accepts, see ``normalize_messages`` and ``normalize_tools``.
    tool_format: how calls are written; by default as the template does.
    add_generation_prompt: open the assistant's turn; by default yes, unless ``continue_final_message`` asks to go on
    with the last message. chat_template: a template, or the name of one of the model's. chat_template_kwargs:
    variables for it. add_special_tokens: those that the tokenizer adds to a text, too. split_special_tokens: the text
    of special tokens in messages, tools and documents is encoded as text; False lets it act as control tokens.

    A template that refuses messages of one role in a row, or a system message, gets them joined, or put in front of
    the next user's. Raises ``RequestRejectedError`` for what it refuses all the same.
    """
    variables = dict(chat_template_kwargs or {})
    for name in variables:
        if name in _OWN_OPTIONS:
            raise RequestRejectedError(
                f"chat_template_kwargs must not have {name!r}: it is an option of its own"
            )
    if continue_final_message and add_generation_prompt:
        raise RequestRejectedError("continue_final_message and add_generation_prompt exclude each other")
    tokenizer = needed(tokenizer)
    tool_format = tool_format or tool_format_for(tokenizer, chat_template)
    offered = normalize_tools(tools)
    told = offered if tool_format.native else []
    source = tokenizer.template_source(chat_template, bool(told))
    chat = normalize_messages(messages, knows_developer="developer" in source)
    if not tool_format.native:
        chat = _spelled_out(chat, offered)
    elif tool_format.name == "mistral":
        chat = [_nine(message) for message in chat]

    def render(some: Chat) -> tuple[str, list[int]]:
        rendered: tuple[str, list[int]] = tokenizer.render_chat(
            some,
            tools=told or None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
            **variables,
        )
        return rendered

    (text, ids), chat = _first_accepted(render, chat)
    _check_roles(render, chat, source)
    return {"prompt": text, "prompt_token_ids": ids}


def _first_accepted(render: _Render, chat: Chat) -> tuple[tuple[str, list[int]], Chat]:
    """What the template makes of the messages as they are, else of forms of them that exacting templates take."""
    refusal: RequestRejectedError | None = None
    for change in (None, _only_objects, _joined, _without_system):
        changed = chat if change is None else change(chat)
        if change is not None and changed == chat:
            continue
        chat = changed
        try:
            return render(chat), chat
        except RequestRejectedError as error:
            refusal = refusal or error
    raise refusal or RequestRejectedError("messages must be a list of at least one message")


def _only_objects(chat: Chat) -> Chat:
    """Arguments that are no JSON object become one, for templates that write them one by one."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if isinstance(function["arguments"], dict):
            return call
        return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}

    return [
        {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in chat
    ]


def _joined(chat: Chat) -> Chat:
    """Messages of one role in a row become one, for templates in which user and assistant alternate."""
    joined: Chat = []
    for message in chat:
        last = joined[-1] if joined else None
        plain = message["role"] != "tool" and "tool_calls" not in message
        if last is not None and last["role"] == message["role"] and plain and "tool_calls" not in last:
            text = f"{text_of(last['content'])}\n\n{text_of(message['content'])}"
            joined[-1] = {**last, "content": text.strip("\n")}
        else:
            joined.append(message)
    return joined


def _without_system(chat: Chat) -> Chat:
    """System messages stand at the beginning of the user's next one, for templates that know no such role."""
    left: Chat = []
    waiting: list[str] = []
    for message in chat:
        if message["role"] in ("system", "developer"):
            waiting.append(text_of(message["content"]))
            continue
        if waiting and message["role"] != "user":
            left.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        elif waiting:
            text = "\n\n".join([*waiting, text_of(message["content"])])
            message, waiting = {**message, "content": text}, []
        left.append(message)
    if waiting:
        left.append({"role": "user", "content": "\n\n".join(waiting)})
    return _joined(left)


def _check_roles(render: _Render, chat: Chat, source: str) -> None:
    """Refuse roles of the caller's own that the template leaves out, or takes for another one."""
    for number, message in enumerate(chat):
        role = message["role"]
        if role in KNOWN_ROLES:
            continue
        probe = [*chat[:number], {**message, "content": _PROBE}, *chat[number + 1 :]]
        shown, _ = render(probe)
        if _PROBE not in shown or not (role in source or role in shown):
            raise RequestRejectedError(
                f"messages.{number}.role must be one that this model's chat template knows, such as "
                f"{', '.join(sorted(KNOWN_ROLES))}; it leaves out {role!r:.60}"
            )


def _spelled_out(messages: Chat, tools: Sequence[Mapping[str, Any]]) -> Chat:
    """The conversation in system, user and assistant messages only, tools and calls as text."""
    chat: Chat = []
    results = False
    for message in messages:
        role, content = message["role"], text_of(message["content"])
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
            chat.append(message)
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=listed)
        if chat and chat[0]["role"] in ("system", "developer"):
            chat[0] = {**chat[0], "content": f"{text_of(chat[0]['content'])}\n\n{introduction}"}
        else:
            chat.insert(0, {"role": "system", "content": introduction})
    return chat


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _nine(message: dict[str, Any]) -> dict[str, Any]:
    """A copy whose call ids have the nine letters and digits that Mistral's templates insist on."""

    def nine(index: Any) -> str:
        text = str(index)
        return text if len(text) == 9 and text.isalnum() else hashlib.blake2b(text.encode()).hexdigest()[:9]

    copy = dict(message)
    if copy.get("tool_call_id"):
        copy["tool_call_id"] = nine(copy["tool_call_id"])
    if copy.get("tool_calls"):
        copy["tool_calls"] = [{**call, "id": nine(call["id"])} for call in copy["tool_calls"]]
    return copy
