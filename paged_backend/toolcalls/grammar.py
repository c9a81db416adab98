"""Grammars that hold a reply to well-formed calls of the given tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.constrain.schema import prepare_schema
from paged_backend.errors import RequestRejectedError
from paged_backend.toolcalls.formats import ToolFormat

# spaced as models have seen calls in their prompts
_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
FORCED = ("required", "any")


def tool_outputs(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    *,
    parallel: bool | None = None,
    response_schema: Mapping[str, Any] | None = None,
) -> StructuredOutputs | None:
    """The form of a reply that may, or must, call ``tools`` (in OpenAI's form).

    choice: ``auto`` for text in which every call that is begun is a valid one, ``required`` or ``any`` for calls only,
    the name of a tool for one call of it. parallel: several calls in one reply; by default only where the choice is
    free, so that a forced call ends the reply. response_schema: with ``auto``, a reply that calls nothing is JSON
    of this schema. None where nothing can be imposed: calls without a marker (Llama 3) in free text look like text.
    """
    functions = [tool.get("function", tool) for tool in tools]
    names = [str(function["name"]) for function in functions]
    if choice not in ("auto", *FORCED):
        if choice not in names:
            raise RequestRejectedError(f"tool_choice {choice!r} is none of the tools: {', '.join(names)}")
        functions = [function for function in functions if function["name"] == choice]
        parallel = False
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    rules += [
        f"call_{i}: %json {_call_schema(tool_format, function)}" for i, function in enumerate(functions)
    ]
    free = choice == "auto"
    many = free if parallel is None else parallel
    if free and response_schema is None and tool_format.bare:
        return None
    if free and response_schema is None:
        rules[:0] = _text_and_calls(tool_format, many)
    else:
        rules[:0] = [f"calls: {_calls(tool_format, many)}", f"start: calls{' | reply' if free else ''}"]
        if free:
            schema = prepare_schema(dict(response_schema or {}))
            compact = {**_SPACING, "item_separator": ",", "key_separator": ":"}
            rules.append(f"reply: %json {json.dumps({**schema, 'x-guidance': compact}, ensure_ascii=False)}")
    return StructuredOutputs(grammar="\n".join(rules) + "\n")


def _calls(tool_format: ToolFormat, many: bool) -> str:
    if tool_format.name == "mistral":
        return f"{_marker(tool_format)} {_list(many)}"
    if tool_format.bare:
        return _repeated("call", "; ", many)
    return _repeated(f'"{tool_format.start}\\n" call "\\n{tool_format.end}"', "\\n", many)


def _text_and_calls(tool_format: ToolFormat, many: bool) -> list[str]:
    text = "TEXT: /(.|\\n)*/"
    if tool_format.start_id is not None:  # a special token cannot occur in text
        return [f"start: TEXT ({_calls(tool_format, many)})?", text]
    trigger = f'trigger[lazy]: /(.|\\n)*/ "{tool_format.start}"'
    if tool_format.name == "mistral":
        return [f"start: TEXT | trigger {_list(many)}", trigger, text]
    body = f'trigger "\\n" call "\\n{tool_format.end}"'
    # a second call could hide in text that followed the only one, so nothing does
    return [f"start: ({body})* TEXT" if many else f"start: {body} | TEXT", trigger, text]


def _list(many: bool) -> str:
    return f'"[" {_repeated("call", ", ", many)} "]"'


def _repeated(rule: str, separator: str, many: bool) -> str:
    return f'{rule} ("{separator}" {rule})*' if many else rule


def _marker(tool_format: ToolFormat) -> str:
    return f'"{tool_format.start}"' if tool_format.start_id is None else f"<[{tool_format.start_id}]>"


def _call_schema(tool_format: ToolFormat, function: Mapping[str, Any]) -> str:
    parameters = prepare_schema(dict(function.get("parameters") or {}))
    if not parameters.get("properties") and "additionalProperties" not in parameters:
        parameters = {**parameters, "type": "object", "additionalProperties": False}
    key = tool_format.arguments_key
    schema = {
        "x-guidance": _SPACING,
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: _rebase(parameters, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json.dumps(schema, ensure_ascii=False)


def _rebase(schema: Any, root: str) -> Any:
    """The same schema after it was moved to ``root``: references from the old root start there now."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase(value, root)
            for key, value in schema.items()
        }  # fmt: skip
    return [_rebase(item, root) for item in schema] if isinstance(schema, list) else schema
