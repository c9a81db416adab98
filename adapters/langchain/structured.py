"""with_structured_output: a model held to a schema, and a parser for what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from paged_backend.constrain.references import moved

METHODS = ("json_schema", "function_calling", "json_mode")
_VALUE = "value"  # the argument of a function whose schema is none of an object


def structured_runnable(
    model: Any,
    schema: Any,
    method: str,
    include_raw: bool,
    strict: bool | None,
    options: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """options: further keywords for every call. Raises ValueError for an unknown method or a missing schema, TypeError
    for a schema that is neither a JSON schema nor a type that has one."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema; without one use method='json_mode'")
    found, adapter = (None, None) if schema is None else _json_schema(schema)
    # for tracing, which reads models of objects, and functions in OpenAI's form of whatever schema
    told: Any = None if found is None else {"name": _name(schema, found), "parameters": found}
    if _is_pydantic(schema) and _is_object(found or {}):
        told = schema
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": told}
    parser: Any
    if method == "function_calling":
        tool = _tool(schema, found or {})
        name = tool["function"]["name"]
        bound = model.bind_tools(
            [tool], tool_choice=name, strict=strict, ls_structured_output_format=traced, **options
        )
        if _is_pydantic(schema) and _is_object(found or {}):
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            adapter = TypeAdapter(schema) if _is_pydantic(schema) else adapter
            if not _is_object(found or {}) or adapter is not None:
                parser = parser | RunnableLambda(_Arguments(_is_object(found or {}), adapter))
    else:
        wanted: dict[str, Any] = {"type": "json_object"}
        if found is not None:
            wanted = {
                "type": "json_schema",
                "json_schema": {"name": _name(schema, found), "schema": found, "strict": strict},
            }
        bound = model.bind(response_format=wanted, ls_structured_output_format=traced, **options)
        if _is_pydantic(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        else:
            parser = JsonOutputParser() if adapter is None else TypeOutputParser(adapter=adapter)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


class TypeOutputParser(JsonOutputParser):
    """JSON as a value of a type that pydantic knows: an enum, a list of models, a union, a dataclass."""

    adapter: Any
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def parse_result(self, result: list[Any], *, partial: bool = False) -> Any:
        """None where ``partial`` output is no such value yet."""
        try:
            return _validated(self.adapter, super().parse_result(result, partial=partial))
        except OutputParserException:
            if partial:
                return None
            raise


class _Arguments:
    """From a call's arguments to the value that was asked for; None where nothing was called."""

    def __init__(self, is_object: bool, adapter: Any) -> None:
        self._is_object, self._adapter = is_object, adapter

    def __call__(self, arguments: Any) -> Any:
        if arguments is None:
            return None
        value = arguments if self._is_object else arguments.get(_VALUE)
        return value if self._adapter is None else _validated(self._adapter, value)


def _validated(adapter: Any, value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise OutputParserException(f"the output is no such value: {error}", llm_output=str(value)) from error


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def _json_schema(schema: Any) -> tuple[dict[str, Any], Any]:
    """(JSON schema, pydantic's adapter where the parsed value is more than JSON data and no model)."""
    if isinstance(schema, Mapping):
        return _of_mapping(dict(schema)), None
    if _is_pydantic(schema):
        return (schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema.schema()), None
    if is_typeddict(schema) or isinstance(schema, BaseTool):
        return convert_to_json_schema(schema), None
    if callable(schema) and hasattr(schema, "__code__"):  # a function: its arguments are wanted
        return convert_to_json_schema(schema), None
    try:
        if isinstance(schema, str):
            raise TypeError("text is no type")
        adapter: Any = TypeAdapter(schema)
        return adapter.json_schema(), adapter
    except (PydanticUserError, TypeError) as error:
        raise TypeError(
            f"schema must be a JSON schema or a type that has one (a pydantic model, TypedDict, Enum, dataclass, "
            f"list[...], Union ...), got {schema!r:.80}: {str(error).splitlines()[0]}"
        ) from error


def _of_mapping(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema as it is; the schema of a function's arguments in OpenAI's, Anthropic's or Bedrock's form."""
    if schema.get("type") == "function" or any(name in schema for name in ("input_schema", "toolSpec")):
        return convert_to_json_schema(schema)
    if not isinstance(schema.get("name"), str):
        return schema
    head = {"title": schema.pop("name")}
    parameters = schema.pop("parameters", {})
    return {**head, **schema, **parameters}


def _is_object(schema: dict[str, Any]) -> bool:
    reference = schema.get("$ref")
    if isinstance(reference, str) and "properties" not in schema:
        target: Any = schema
        for step in reference.lstrip("#").split("/")[1:]:
            target = (
                target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            )
        return (
            isinstance(target, dict) and target is not schema and "$ref" not in target and _is_object(target)
        )
    return schema.get("type", "object" if "properties" in schema else None) == "object"


def _tool(schema: Any, found: dict[str, Any]) -> dict[str, Any]:
    parameters = {key: value for key, value in found.items() if key not in ("title", "description")}
    if not _is_object(found):
        parameters = {
            "type": "object",
            "properties": {
                _VALUE: parameters if "$id" in parameters else moved(parameters, f"#/properties/{_VALUE}")
            },
            "required": [_VALUE],
        }
    function = {"name": _name(schema, found), "parameters": parameters}
    if found.get("description"):
        function["description"] = found["description"]
    return {"type": "function", "function": function}


def _name(schema: Any, found: dict[str, Any]) -> str:
    given = found.get("title") or ("" if isinstance(schema, Mapping) else getattr(schema, "__name__", ""))
    return re.sub(r"[^A-Za-z0-9_-]+", "_", str(given)).strip("_") or "output"
