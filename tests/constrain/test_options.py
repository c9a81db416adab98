"""What structured_outputs may say, and what is said of it when it may not."""

from __future__ import annotations

import pytest

from paged_backend import SamplingParams, StructuredOutputs
from paged_backend.constrain.relax import relax
from paged_backend.constrain.schema import prepare_schema


def test_exactly_one_kind():
    with pytest.raises(ValueError, match=r"exactly one of .*got none"):
        StructuredOutputs()
    with pytest.raises(ValueError, match="got regex, choice"):
        StructuredOutputs(regex="a", choice=["b"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": False}, "must be a JSON schema"),
        ({"json": {"const": object()}}, "only JSON data"),
        ({"json_object": False}, "must be True"),
        ({"regex": ""}, "non-empty string"),
        ({"grammar": 3}, "non-empty string"),
        ({"choice": []}, "non-empty strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"json_object": True, "item_separator": ";"}, "item_separator"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**options)


def test_sampling_params_takes_a_dict_with_the_same_names():
    params = SamplingParams(structured_outputs={"choice": "yes"})
    assert params.structured_outputs == StructuredOutputs(choice=("yes",))
    with pytest.raises(ValueError, match="has no 'jsn'"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(ValueError, match="StructuredOutputs or a dict"):
        SamplingParams(structured_outputs="json")


def test_schema_text_and_dict_are_the_same_key():
    assert StructuredOutputs(json='{"type": "object"}') == StructuredOutputs(json={"type": "object"})


def test_objects_that_list_properties_are_closed():
    schema = {"properties": {"a": {"properties": {"b": {}}}, "c": {"properties": {}, "type": "object"}}}
    prepared = prepare_schema(relax(schema)[0])
    assert prepared["additionalProperties"] is False
    assert prepared["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in prepared["properties"]["c"]
    assert "additionalProperties" not in schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"$defs": {"x": {"properties": {"a": {}}}}, "$ref": "#/$defs/x", "properties": {"b": {}}},
    ],
)
def test_schemas_that_speak_of_one_object_together_stay_open(schema):
    assert prepare_schema(relax(schema)[0]) == schema


def test_only_formats_that_bind_are_kept_and_data_is_left_alone():
    schema = {
        "properties": {"a": {"format": "password"}, "b": {"format": "uuid"}},
        "default": {"format": "password"},
    }
    prepared = prepare_schema(relax(schema)[0])
    assert prepared["properties"] == {"a": {}, "b": {"format": "uuid"}}
    assert prepared["default"] == schema["default"]
