"""Chat templates: Jinja from model repositories, rendered as transformers renders them.

Templates are untrusted code, so they run in Jinja's immutable sandbox and see nothing but plain data.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from paged_backend.errors import RequestRejectedError, missing_extra

if TYPE_CHECKING:
    from paged_backend.text.special_text import SpecialText

_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_ASKS_FOR_NONE = re.compile(r"content['\"\]) ]*\s+is\s+(not\s+)?none", re.IGNORECASE)
_PROBE = "paged backend probe"


class ChatTemplate:
    """One compiled template. Raises ``RequestRejectedError`` if it is not valid Jinja."""

    def __init__(self, source: str) -> None:
        from jinja2.exceptions import TemplateSyntaxError

        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise RequestRejectedError(f"the chat template is not valid Jinja: {error}") from error
        self._takes_parts: bool | None = None
        self._asks_for_none = _ASKS_FOR_NONE.search(source) is not None

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages`` (dicts, dataclasses or pydantic objects with ``role`` and ``content``).

        Content may be a string or a list of OpenAI-style parts; for a template that only knows strings the
        text parts are joined by newlines. Arguments of tool calls become objects, see :func:`call_arguments`.
        ``variables`` are visible to the template. Raises ``RequestRejectedError`` for what the template
        refuses, malformed messages, and parts that are not text where only text can be taken.
        """
        chat, schemas = self._prepared(messages, tools, variables)
        return self._render(chat, schemas, add_generation_prompt, continue_final_message, variables)

    def render_with(
        self,
        special: SpecialText,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[str, Callable[[], list[int]] | None]:
        """(what :meth:`render` gives; if messages, tools or documents have special tokens in them, a function that
        encodes those as text, else None).

        Where the template itself looks for special tokens in what the assistant said (to leave thoughts out, say),
        those stay what they are.
        """
        chat, schemas = self._prepared(messages, tools, variables)
        options = (add_generation_prompt, continue_final_message)
        text = self._render(chat, schemas, *options, variables)
        documents = plain_data(variables.get("documents"))
        if not special.touches([chat, schemas, documents]):
            return text, None
        marks = special.marks(text)
        own = [
            message if message.get("role") == "assistant" else put
            for message, put in zip(chat, marks.put(chat))
        ]
        variables = {**variables, "documents": marks.put(documents)}
        marked = None
        for some in (marks.put(chat), own):
            try:
                found = self._render(some, marks.put(schemas), *options, variables)
            except RequestRejectedError:
                continue
            marked = found if marked is None else marked
            if marks.strip(found) == text:
                return text, partial(marks.encode, found)
        if marked is None:
            raise RequestRejectedError(
                "messages: the chat template refuses special tokens that are only text"
            )
        return marks.strip(marked), partial(marks.encode, marked)

    def _prepared(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], Any]:
        chat = [self._message(message, index) for index, message in enumerate(messages)]
        if not chat:
            raise RequestRejectedError("the conversation is empty; give at least one message")
        if any(isinstance(message.get("content"), (list, tuple)) for message in chat) and not self._parts(
            variables
        ):
            for message in chat:
                if isinstance(message.get("content"), (list, tuple)):
                    message["content"] = _flatten(message["content"])
        return chat, None if tools is None else [plain_data(tool_schema(tool)) for tool in tools]

    def _render(
        self,
        chat: Sequence[dict[str, Any]],
        schemas: Any,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if not continue_final_message:
            return self._run(chat, schemas, add_generation_prompt, variables)
        last, final = _mark_final(chat[-1])
        return _cut_at_mark(self._run([*chat[:-1], last], schemas, add_generation_prompt, variables), final)

    def _message(self, message: Any, index: int) -> dict[str, Any]:
        data = _as_dict(message, index)
        reasoning = next((data[name] for name in _REASONING if name in data), None)
        if reasoning is not None:
            data = {"thinking": reasoning, **data, "reasoning_content": reasoning}
        calls = data.get("tool_calls")
        for call in calls or ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict):
                function["arguments"] = call_arguments(function.get("arguments"))
        if calls and self._asks_for_none and not data.get("content"):
            data["content"] = (
                None  # such a template takes a message with any other content for one without calls
            )
        return data

    def _run(
        self, chat: Sequence[Any], tools: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        try:
            return self._template.render(
                {
                    "documents": None,
                    **{name: plain_data(value) for name, value in variables.items()},
                    "messages": list(chat),
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:
            # whatever a template runs into (its own raise_exception, a missing field) is the request's fault
            raise RequestRejectedError(f"the chat template cannot render these messages: {error}") from error

    def _parts(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template itself can take a list of parts, found out by giving it one.

        A template that cannot either fails or prints the list as Python would.
        """
        if self._takes_parts is None:
            probe = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
            try:
                text = self._run(probe, None, False, variables)
                self._takes_parts = _PROBE in text and "'type'" not in text and '"type"' not in text
            except RequestRejectedError:
                self._takes_parts = False
        return self._takes_parts


def plain_data(value: Any) -> Any:
    """``value`` rebuilt from JSON types. Anything else becomes an inert name: methods of rich objects
    (arrays, images) would be callable from inside the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain_data(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


def _as_dict(message: Any, index: int) -> dict[str, Any]:
    data = plain_data(message)
    if not isinstance(data, dict):
        raise RequestRejectedError(
            f"message {index} must be a dict with 'role' and 'content', got {type(message).__name__}"
        )
    # OpenAI clients send content=None and tool_calls=None; templates would print the word None
    return {key: value for key, value in data.items() if value is not None}


def call_arguments(value: Any) -> Any:
    """The arguments of a tool call as templates expect them: an object. Blank, ``null`` and missing ones are ``{}``.

    What is no JSON object stays the text that it is: a model may have written it, and is to see it again.
    """
    if not isinstance(value, str):
        return {} if value is None else value
    if not value.strip():
        return {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else value


def _flatten(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str) and kind in (None, *_TEXT_TYPES):
            texts.append(part["text"])
        else:
            raise RequestRejectedError(
                f"this model's chat template takes only text, got a content part of type {kind!r}"
            )
    return "\n".join(texts)


def _mark_final(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(a copy with a marker behind the message's text, by which its end is found in the rendered prompt; the text)."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}, content
    parts = list(content) if isinstance(content, (list, tuple)) else []
    for place, part in reversed(list(enumerate(parts))):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            parts[place] = {**part, "text": text + _MARK}
            return {**message, "content": parts}, text
    raise RequestRejectedError("continue_final_message needs a last message with text to continue")


def _cut_at_mark(text: str, final: str) -> str:
    position = text.rfind(_MARK.strip())
    if position < 0 or final.strip() not in text:
        raise RequestRejectedError(
            "continue_final_message: the chat template leaves out or changes the last message, so its end "
            "cannot be found"
        )
    head = text[:position]
    # a template that trims messages has eaten the marker's own space: the text it would keep has none at its
    # end
    return head if text.startswith(_MARK, position) else head.rstrip()


def tool_schema(tool: Any) -> Any:
    """A tool's JSON schema: itself, or that of a documented function. Raises ``RequestRejectedError``."""
    if callable(tool) and not isinstance(tool, type) and not hasattr(tool, "model_dump"):
        with missing_extra("huggingface", "a tool that is a function and no JSON schema"):
            from transformers.utils import get_json_schema
        try:
            return get_json_schema(tool)
        except Exception as error:
            raise RequestRejectedError(f"tool {getattr(tool, '__name__', tool)!r}: {error}") from error
    if not isinstance(tool, Mapping) and not hasattr(tool, "model_dump"):
        raise RequestRejectedError(
            f"a tool must be a JSON schema or a documented function, got {type(tool).__name__}"
        )
    return tool


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks assistant text for training masks; when rendering, it is only a
        scope."""

        tags = {"generation"}  # noqa: RUF012 (the name and type that Jinja asks for)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Refuses underscored names, which lead to interpreter internals."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *rest = args
            for name in dict(*rest, **values):
                _refuse_underscore(name)
            jinja2.utils.Namespace.__init__(self, *rest, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            super().__setitem__(name, value)

    def _refuse_underscore(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")

    def fail(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": fail,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
    }
    environment.globals.update(helpers)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
