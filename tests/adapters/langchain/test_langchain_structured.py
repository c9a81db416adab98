"""with_structured_output honours every schema that a type or a JSON schema can say, by every method, or names it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest

pytest.importorskip("langchain_core")
pytest.importorskip("llguidance")

from pydantic import BaseModel, Field, RootModel, TypeAdapter
from typing_extensions import TypedDict

from paged_backend.adapters.langchain import ChatPaged
from paged_backend.testing import reply_engine


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """Where it is."""

    x: int = Field(ge=0, le=9)
    colour: Colour


class Tree(BaseModel):
    leaf: Literal[1, 2]
    branch: Tree | None = None


class Numbers(RootModel[list[Annotated[int, Field(ge=0, le=9)]]]):
    pass


class Pair(TypedDict):
    """A pair."""

    first: Annotated[int, ..., "the first"]
    second: bool


@dataclasses.dataclass
class Size:
    width: Annotated[int, Field(ge=0, le=9)]


def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2] = 1) -> str:
    """Tell the weather.

    Args:
        city: where
        days: how many
    """
    return ""


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
PICK: dict[str, Any] = {"title": "pick", "description": "Pick one."}
DICTS = {
    "enum": {**PICK, "type": "string", "enum": ["red", "blue"]},
    "array": {
        **PICK,
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxItems": 3,
    },
    "anyOf": {**PICK, "anyOf": [ONE, {**ONE, "properties": {"a": {"const": 2}}}]},
    "oneOf": {**PICK, "oneOf": [{"type": "null"}, ONE]},
    "allOf": {**PICK, "allOf": [ONE]},
    "$ref": {**PICK, "$ref": "#/$defs/X", "$defs": {"X": ONE}},
    "$ref to no object": {**PICK, "$ref": "#/$defs/X", "$defs": {"X": {"enum": [1, None]}}},
    "recursive list": {
        **PICK,
        "type": "array",
        "items": {"anyOf": [{"$ref": "#"}, {"const": 1}]},
        "maxItems": 2,
    },
    "const": {**PICK, "const": "yes"},
    "number": {**PICK, "type": "integer", "minimum": 3, "maximum": 5},
    "object without a title": ONE,
    "properties without a type": {**PICK, "properties": ONE["properties"], "required": ["a"]},
    "type list": {**PICK, "type": ["boolean", "null"]},
}
FUNCTIONS = {
    "OpenAI's function": {"name": "pick", "description": "d", "parameters": ONE},
    "OpenAI's tool": {"type": "function", "function": {"name": "pick", "parameters": ONE}},
    "Anthropic's tool": {"name": "pick", "description": "d", "input_schema": ONE},
    "a name in the place of a title": {"name": "pick", **ONE},
}
TYPES: list[Any] = [
    Point, Tree, Numbers, Colour, Size, list[Point], Union[Point, Size], Point | Size, Optional[Point],  # noqa: UP007, UP045
    Point | None, Literal["a", "b"], bool, dict[Literal["k"], bool], tuple[bool, Colour],
]  # fmt: skip
METHODS = ["json_schema", "function_calling", "json_mode"]


@pytest.fixture(scope="module")
def engine():
    with reply_engine(lambda prompt: "{") as engine:
        yield engine
        engine.check()


@pytest.fixture
def chat(engine):
    return ChatPaged(model="scripted", engine=engine, temperature=0, max_tokens=100)


def answers(chat, schema, method):
    """The value in one piece, as the last of a stream, and from include_raw."""
    model = chat.with_structured_output(schema, method=method)
    found = [model.invoke("Pick."), list(model.stream("Pick."))[-1]]
    raw = chat.with_structured_output(schema, method=method, include_raw=True).invoke("Pick.")
    assert raw["raw"].type == "ai"
    assert raw["parsing_error"] is None
    return [*found, raw["parsed"]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DICTS)
def test_json_schemas_of_any_top(name, method, chat):
    jsonschema = pytest.importorskip("jsonschema")
    for value in answers(chat, DICTS[name], method):
        jsonschema.validate(value, DICTS[name])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_mean_their_arguments(name, method, chat):
    for value in answers(chat, FUNCTIONS[name], method):
        assert value == {"a": 1}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", TYPES, ids=str)
def test_types_come_back_as_their_values(schema, method, chat):
    adapter = TypeAdapter(schema)
    for value in answers(chat, schema, method):
        assert adapter.validate_python(value, strict=True) == value


@pytest.mark.parametrize("method", METHODS)
def test_typed_dicts_and_functions_come_back_as_dicts(method, chat):
    for value in answers(chat, Pair, method):
        assert set(value) == {"first", "second"}
    for value in answers(chat, weather, method):
        assert value["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("schema", [42, "int", object(), [int]], ids=repr)
def test_what_is_no_schema_is_refused_by_name(schema, chat):
    with pytest.raises((TypeError, ValueError)):
        chat.with_structured_output(schema)


def test_strict_refuses_by_name_what_is_relaxed_otherwise(chat, caplog):
    schema = {
        **ONE,
        "title": "unique",
        "properties": {"a": {"type": "array", "items": ONE, "uniqueItems": True}},
    }
    for method, label in (("json_schema", "structured_outputs.json"), ("function_calling", "tool 'unique'")):
        assert "a" in chat.with_structured_output(schema, method=method).invoke("Pick.")
        with pytest.raises(ValueError, match=f"{label}: 'uniqueItems' at #/properties/a"):
            chat.with_structured_output(schema, method=method, strict=True).invoke("Pick.")
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "structured_outputs.json: 'uniqueItems' at #/properties/a has no form in a grammar",
        "tool 'unique': 'uniqueItems' at #/properties/a has no form in a grammar",
    ]
