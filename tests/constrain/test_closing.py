"""Outputs are complete within max_tokens, whatever the form and the model: else the request is refused at the door."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.constrain.options import StructuredOutputs
from paged_backend.errors import RequestRejectedError

EOS = 2
PATTERNS = [
    "^(foo|bar)+baz$", "^[a-z]+@example\\.com$", "^([A-Z][a-z]+ )+Street$", "^[^@]+@[^@]+\\.[a-z]{2,}$",
    "^\\d{3}-\\d{4}$", "^(\\d{1,3}\\.){3}\\d{1,3}$", "^#([0-9a-f]{3}|[0-9a-f]{6})$", "^(yes|no)(, (yes|no))*\\.$",
    "^(?:[A-Z]{2}-\\d;){3,}$", "^(a|b)*c(a|b){4}$", "\\d", "^[^\\W\\d_]\\w*(\\[\\d+\\])?$", '^"(\\\\.|[^"])*"$',
    "^((ab|cd){2}|x(yz)+)!$", "^.{12,}\\.$",
]  # fmt: skip
FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration"]


def schemas():
    plain = st.sampled_from(
        [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "string"}]
    )
    lengths = st.tuples(st.integers(0, 12), st.integers(0, 30)).map(
        lambda n: {"type": "string", "minLength": n[0], "maxLength": sum(n)}
    )
    patterns = st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p})
    numbers = st.tuples(st.integers(-50, 2000), st.integers(0, 500)).map(
        lambda n: {"type": "integer", "minimum": n[0], "maximum": sum(n)}
    )
    leaves = st.one_of(
        plain,
        lengths,
        patterns,
        numbers,
        st.sampled_from(FORMATS).map(lambda f: {"type": "string", "format": f}),
        st.sampled_from(
            [{"enum": ["alpha", "beta", 7]}, {"const": {"a": [1, "é"]}}, {"pattern": PATTERNS[0]}]
        ),
        st.just({"type": "string", "pattern": PATTERNS[2], "minLength": 20}),
        st.just(
            {
                "patternProperties": {PATTERNS[4]: {"type": "null"}},
                "type": "object",
                "additionalProperties": False,
            }
        ),
    )

    def deeper(inner):
        arrays = st.tuples(inner, st.integers(0, 3)).map(
            lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + 2}
        )
        objects = st.tuples(st.dictionaries(st.sampled_from("abcdé"), inner, max_size=3), st.booleans()).map(
            lambda o: {
                "type": "object",
                "properties": o[0],
                "required": sorted(o[0]) if o[1] else sorted(o[0])[:1],
            }
        )
        either = st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches})
        return st.one_of(arrays, objects, objects, either)

    trees = st.recursive(leaves, deeper, max_leaves=5)
    recursive = leaves.map(
        lambda item: {
            "type": "object",
            "properties": {"v": item, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    )
    return trees | recursive


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, [EOS])


def least_budget(grammar):
    """What the refusal of a request that asks for nothing names."""
    try:
        grammar.open(0, [EOS])
    except RequestRejectedError as error:
        return int(re.search(r"at least (\d+)", str(error))[1])
    return 0


def opened(grammar, budget):
    """The state, or None where ``budget`` is refused for one that is larger."""
    if budget < 0:
        return None
    try:
        return grammar.open(budget, [EOS])
    except RequestRejectedError as error:
        problem = str(error)
    assert int(re.search(r"at least (\d+)", problem)[1]) > budget
    return None


def generate(state, budget, rng):
    tokens = []
    while len(tokens) < budget and not state.ended:
        allowed = np.flatnonzero(state.mask())
        inside = allowed[allowed != EOS]
        token = state.settle(int(rng.choice(inside if len(inside) else allowed)))
        if token == EOS:
            break
        state.advance(token)
        tokens.append(token)
    return tokens, state.complete


@settings(max_examples=120)
@given(schemas(), st.integers(0, 1000), st.sampled_from([-3, -1, 0, 1, 2, 5, 12, 40]))
def test_json_is_complete_and_valid_at_any_budget_that_suffices(compiler, tokenizer, schema, seed, extra):
    grammar = compiler.compile(StructuredOutputs(json=schema))
    least = least_budget(grammar)
    state = opened(grammar, least + extra)
    if state is None:
        assert extra < 0
        return
    tokens, complete = generate(state, least + extra, random.Random(seed))
    assert complete
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
        json.loads(tokenizer.decode(tokens))
    )


@settings(max_examples=150)
@given(
    st.data(),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    st.integers(0, 1000),
    st.integers(-2, 30),
)
def test_a_regex_is_matched_at_any_budget_and_needs_no_more_than_its_shortest_text(
    compiler, tokenizer, data, patterns, seed, extra
):
    pattern = "-".join(f"(?:{p.strip('^$')})" for p in patterns)
    grammar = compiler.compile(StructuredOutputs(regex=pattern))
    least = least_budget(grammar)
    ascii_text = st.characters(min_codepoint=32, max_codepoint=126)
    some = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True, alphabet=ascii_text))
    assert least <= len(some)
    state = opened(grammar, least + extra)
    if state is None:
        assert extra < 0
        return
    tokens, complete = generate(state, least + extra, random.Random(seed))
    assert complete
    assert re.fullmatch(pattern, tokenizer.decode(tokens), re.ASCII)


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": 'start: /(foo|bar)+baz/ "x" /[a-z]+q/'},
        {"grammar": 'start: item+ "end"\nitem: /[a-z]+/ ":" /\\d+/ ";"'},
        {"grammar": 'start: (A|B)+ "baz"\nA: "foo"\nB: "bar"'},
        {"grammar": 'start: "<" start ">" | "x"'},
        {"grammar": 'root ::= ("ab" | "cd")+ "." [0-9]+ "!"'},
        {"json": {"type": "array", "items": {"const": 7}, "minItems": 1500}},
        {"json": {"type": "string", "minLength": 3000}},
        {"json_object": True},
        {"choice": ["one", "two", "three hundred"]},
    ],
    ids=str,
)
def test_other_forms_are_complete_at_any_budget_that_suffices(form, compiler):
    grammar = compiler.compile(StructuredOutputs(**form))
    least = least_budget(grammar)
    for extra in (0, 1, 7, 40):
        assert generate(opened(grammar, least + extra), least + extra, random.Random(extra))[1]
