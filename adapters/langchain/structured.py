"""with_structured_output: a model held to a schema, and a parser for what it says."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

METHODS = ("json_schema", "function_calling", "json_mode")


def structured_runnable(
    model: Any,
    schema: Any,
    method: str,
    include_raw: bool,
    strict: bool | None,
    options: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """options: further keywords for every call. Raises ValueError for an unknown method or a missing schema."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema; without one use method='json_mode'")
    is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    parser: Any
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = model.bind_tools(
            [schema], tool_choice=name, strict=strict, ls_structured_output_format=traced, **options
        )
        if is_pydantic:
            parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
        else:
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    else:
        wanted: dict[str, Any] = {"type": "json_object"}
        if schema is not None:
            found = convert_to_json_schema(schema)
            wanted = {
                "type": "json_schema",
                "json_schema": {"name": found.get("title", "output"), "schema": found, "strict": strict},
            }
        bound = model.bind(response_format=wanted, ls_structured_output_format=traced, **options)
        parser = PydanticOutputParser(pydantic_object=schema) if is_pydantic else JsonOutputParser()
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
