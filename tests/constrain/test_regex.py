"""Regexes mean what Python means by them with re.ASCII: in structured_outputs.regex, in schemas and in Lark."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from paged_backend.constrain.grammar import GrammarCompiler
from paged_backend.constrain.options import StructuredOutputs
from paged_backend.constrain.regex import RegexError, to_grammar_regex
from paged_backend.errors import RequestRejectedError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Possible:FutureWarning"
)  # classes that look like sets of sets
EOS = 2
# digits, letters and spaces that only Unicode counts as such, those that fold to ASCII letters, and ends of lines
STRANGE = "٣🯸é\u00a0\u2003\u212a\u017f\u2028\r\x1c"
ATOMS = (
    "a", "B", "k", "s", "7", "-", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", r"\.", r"\-", "[a-f]", "[^a-f]",
    r"[\d.]",
    r"[^\d]", r"[^\D]", r"[\w-]", r"[^\W_]", r"[^\s,]", r"[\S]", "[]x]", "[^]x]", "[a&&b]", "[x-z--9]", "[[k]",
    r"[\]\\]", "{",
    "a{", r"\<", r"\x4b", r"\u0041", r"\/", "/", r"\ ", "é", "[à-ü]", "(?i:k)", "(?i:[h-l])", r"(?i:\w)", "(?s:.)",
    r"(?:\d|k)", r"(?P<n>s|\s)", "(?x: a # comment\n )",
)  # fmt: skip


def patterns():
    atom = st.sampled_from(ATOMS)
    counted = st.tuples(atom, st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{2,}", "+?", "??"])).map(
        "".join
    )
    piece = st.lists(counted, min_size=1, max_size=3).map("".join)
    either = st.lists(piece, min_size=1, max_size=2).map("|".join)
    whole = st.tuples(st.sampled_from(["", "(?i)", "(?s)"]), either).map("".join)
    return whole.filter(lambda pattern: pattern.count("(?P<n>") < 2)  # Python has each name once


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, [EOS])


def accepts(state, tokenizer, text):
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not state.mask()[token]:
            return False
        state.settle(token)
        state.advance(token)
    return state.complete


@settings(max_examples=150)
@given(st.data(), patterns())
def test_a_regex_admits_what_python_admits_in_ascii_and_nothing_that_it_does_not(
    compiler, tokenizer, data, pattern
):
    form = StructuredOutputs(regex=pattern)
    compiled = re.compile(pattern, re.ASCII)
    plain = st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("\n\t")
    text = data.draw(st.from_regex(compiled, fullmatch=True, alphabet=plain | st.sampled_from("éà")))
    ours = compiler.compile(form).open(200, [EOS])
    if text.isascii():
        assert accepts(ours, tokenizer, text)
    text = data.draw(st.text(st.sampled_from(STRANGE + "aBkKsS7- .x/\n"), max_size=4))
    if accepts(compiler.compile(form).open(200, [EOS]), tokenizer, text):
        assert compiled.fullmatch(text)


@settings(max_examples=100)
@given(patterns(), st.integers(0, 1000))
def test_what_is_written_at_random_matches(compiler, tokenizer, pattern, seed):
    rng = random.Random(seed)
    strange = {t for c in STRANGE for t in tokenizer.encode(c, add_special_tokens=False)}
    state = compiler.compile(StructuredOutputs(regex=pattern)).open(24, [EOS])
    tokens = []
    while len(tokens) < 24 and not state.ended:
        allowed = [int(t) for t in np.flatnonzero(state.mask())]
        token = state.settle(rng.choice([t for t in allowed if t in strange] or allowed))
        if token == EOS:
            break
        state.advance(token)
        tokens.append(token)
    if state.complete:
        assert re.fullmatch(pattern, tokenizer.decode(tokens), re.ASCII)


@pytest.mark.parametrize("at", ["pattern", "patternProperties", "propertyNames", "lark", "regex"])
@pytest.mark.parametrize(
    ("pattern", "good", "bad"), [(r"^\d\w$", "1a", "٣a"), (r"^\w\s$", "k ", "é "), (r"^\s$", "\t", "\u2003")]
)
def test_everywhere_a_regex_stands(compiler, tokenizer, at, pattern, good, bad):
    def form(text):
        if at == "regex":
            return StructuredOutputs(regex=pattern), text
        if at == "lark":
            return StructuredOutputs(
                grammar=f'start: "<" R "/>" // a /"comment"\nR: /{pattern[1:-1]}/'
            ), f"<{text}/>"
        if at == "pattern":
            return StructuredOutputs(json={"type": "string", "pattern": pattern}), json.dumps(
                text, ensure_ascii=False
            )
        rules = {at: {pattern: {"const": 1}}} if at == "patternProperties" else {at: {"pattern": pattern}}
        schema = {"type": "object", "additionalProperties": {"const": 1}, **rules}
        if at == "patternProperties":
            schema["additionalProperties"] = False
        return StructuredOutputs(json=schema), json.dumps({text: 1}, ensure_ascii=False)

    for text, expected in ((good, True), (bad, False)):
        wanted, written = form(text)
        assert accepts(compiler.compile(wanted).open(60, [EOS]), tokenizer, written) is expected


def test_unicode_classes_are_there_for_who_asks(compiler, tokenizer):
    for form in (
        {"regex": r"(?u)\d"},
        {"regex": r"\p{Nd}"},
        {"grammar": r"start: /(?u)\d/"},
    ):
        assert accepts(compiler.compile(StructuredOutputs(**form)).open(20, [EOS]), tokenizer, "٣")


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        ("(?=a)b", "look-ahead"), ("(?!a)b", "look-ahead"), ("(?<=a)b", "look-behind"), ("(?<!a)b", "look-behind"),
        (r"\bfoo", "word boundary"), (r"(a)\1", "reference to a group"), ("(?P<n>a)(?P=n)", "reference to a group"),
        ("a++", "possessive"), ("(?>a)", "atomic"), ("(?m)^a$", "flag m"), ("[[:alpha:]]", "POSIX"), (r"\e", "escape"),
        ("[a", "unclosed"), ("a)", "unopened"), ("[b-a]", "range"), ("a\\", "at its end"),
        ("(a)(?(1)b|c)", "condition"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_hold_to_is_refused_by_name(pattern, construct, compiler):
    with pytest.raises(RegexError, match=construct):
        to_grammar_regex(pattern)
    with pytest.raises(RequestRejectedError, match=construct):
        compiler.compile(StructuredOutputs(regex=pattern))


@example([r'\d."/[', "a\n\t\\", "%json {}", "\x7f\x01\x00", "//", "\u2028\ufeff"])
@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=60)
def test_choices_are_what_they_say(compiler, tokenizer, choices):
    grammar = compiler.compile(StructuredOutputs(choice=choices))
    assert all(accepts(grammar.open(60, [EOS]), tokenizer, choice) for choice in choices)
    assert not accepts(
        grammar.open(60, [EOS]), tokenizer, choices[0] + "0" if choices[0] + "0" not in choices else ""
    )
