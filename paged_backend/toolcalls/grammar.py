"""Grammars that hold a reply to well-formed calls of the given tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.constrain.lark import lark_text
from paged_backend.constrain.options import SchemaRule, StructuredOutputs
from paged_backend.errors import RequestRejectedError
from paged_backend.toolcalls.formats import ToolFormat

FORCED = ("required", "any")


def tool_outputs(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    *,
    parallel: bool | None = None,
    response_schema: Mapping[str, Any] | None = None,
    response_strict: bool = False,
) -> StructuredOutputs | None:
    """The form of a reply that may, or must, call ``tools`` (in OpenAI's form).

    choice: ``auto`` for text in which every call that is begun is a valid one, ``required`` or ``any`` for calls only,
    the name of a tool for one call of it. parallel: several calls in one reply; by default only where the choice is
    free, so that a forced call ends the reply. response_schema: with ``auto``, a reply that calls nothing is JSON
    of this schema. None where nothing can be imposed: calls without a marker (Llama 3) in free text look like text.

    Where no grammar can hold to a keyword of a schema, it is left out and named in the log, unless the tool is
    ``strict`` (for response_schema: ``response_strict``); then the request is refused.
    """
    functions = [tool.get("function", tool) for tool in tools]
    names = [str(function["name"]) for function in functions]
    if choice not in ("auto", *FORCED):
        if choice not in names:
            raise RequestRejectedError(f"tool_choice {choice!r} is none of the tools: {', '.join(names)}")
        functions = [function for function in functions if function["name"] == choice]
        parallel = False
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    rules += [_call(tool_format, i, str(function["name"])) for i, function in enumerate(functions)]
    schemas = [_arguments(i, function) for i, function in enumerate(functions)]
    free = choice == "auto"
    many = free if parallel is None else parallel
    if free and response_schema is None and tool_format.bare:
        return None
    if free and response_schema is None:
        rules[:0] = _text_and_calls(tool_format, many)
    else:
        rules[:0] = [f"calls: {_calls(tool_format, many)}", f"start: calls{' | reply' if free else ''}"]
        if free:
            schemas.append(SchemaRule("reply", response_schema or {}, "response_format", response_strict))
    return StructuredOutputs(grammar="\n".join(rules) + "\n", schemas=schemas)


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


def _call(tool_format: ToolFormat, number: int, name: str) -> str:
    written = json.dumps(name, ensure_ascii=False)
    head = lark_text(f'{{"name": {written}, "{tool_format.arguments_key}": ')
    return f'call_{number}: {head} args_{number} "}}"'


def _arguments(number: int, function: Mapping[str, Any]) -> SchemaRule:
    parameters = dict(function.get("parameters") or {})
    if not parameters.keys() - {"type", "properties", "required", "$schema", "title", "description"} and not (
        parameters.get("properties") or parameters.get("required")
    ):
        parameters = {**parameters, "type": "object", "additionalProperties": False}
    if parameters.get("type") is None:
        parameters["type"] = "object"
    label = f"tool {function['name']!r}"
    return SchemaRule(f"args_{number}", parameters, label, function.get("strict") is True, foreign=True)
