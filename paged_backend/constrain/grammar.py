"""From StructuredOutputs to grammars: compiled once per engine, opened once per request."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from paged_backend.constrain.closing import ClosingOrder, Words
from paged_backend.constrain.lark import lark_grammar, lark_text, lark_words
from paged_backend.constrain.options import SchemaRule, StructuredOutputs
from paged_backend.constrain.regex import regex_words, to_grammar_regex
from paged_backend.constrain.relax import Unenforced, relax
from paged_backend.constrain.repair import repair_schema
from paged_backend.constrain.schema import prepare_schema, schema_words
from paged_backend.constrain.state import Closings, GrammarState
from paged_backend.errors import RequestRejectedError
from paged_backend.tokenization import Tokenizer

logger = logging.getLogger("paged_backend.constrain")
_MAX_TOLD = 10_000  # log lines remembered, so that each is written once
_MAX_GRAMMARS = 64  # compiled grammars an engine keeps


class GrammarCompiler:
    """Compiles for one tokenizer; keeps what it has compiled. Safe from any thread. Everything is built on first use.

    eos_token_ids: end of sequence of the model, which only an allowed end lets through.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._vocabulary: Any = None
        self._order: ClosingOrder | None = None
        self._told: set[tuple[str, str]] = set()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises :class:`RequestRejectedError` for a schema, regex or grammar that is invalid or not supported."""
        with self._lock:
            grammar = self._grammars.get(wanted)
            if grammar is None:
                grammar = self._grammars[wanted] = self._build(wanted)
                if len(self._grammars) > _MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(wanted)
            return grammar

    def _build(self, wanted: StructuredOutputs) -> Grammar:
        llguidance = _llguidance()
        if self._vocabulary is None:
            self._open(llguidance)
        rules = [(rule, self._enforceable(rule)) for rule in _rules(wanted)]
        start = self._start(wanted, [(rule.rule, schema) for rule, schema in rules])
        if start.is_error() and rules:
            for rule, schema in rules:
                self._refuse_or_tell(rule, repair_schema(schema, self._problem_of))
            start = self._start(wanted, [(rule.rule, schema) for rule, schema in rules])
        if start.is_error():
            raise RequestRejectedError(f"structured_outputs cannot be compiled: {_line(start.get_error())}")
        if self._order is None:
            raise RuntimeError("the vocabulary was not opened")
        texts = _words(wanted, [schema for _, schema in rules])
        words = Words([text.encode() for text in texts], self._vocabulary.tokenize_bytes)
        return Grammar(start, self._order, words, self._vocabulary.eos_token)

    def _start(self, wanted: StructuredOutputs, schemas: Sequence[tuple[str, dict[str, Any]]]) -> Any:
        matcher = _llguidance().LLMatcher
        spacing = _spacing(wanted)
        try:
            if wanted.regex is not None:
                source = matcher.grammar_from_regex(to_grammar_regex(wanted.regex))
            elif wanted.choice is not None:
                source = matcher.grammar_from_lark("start: " + " | ".join(map(lark_text, wanted.choice)))
            elif wanted.grammar is not None:
                written = [lark_grammar(wanted.grammar, spacing)]
                for name, schema in schemas:
                    spaced = json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
                    written.append(f"{name}: %json {spaced}")
                source = matcher.grammar_from_lark("\n".join(written) + "\n")
            else:
                source = matcher.grammar_from_json_schema(schemas[0][1], overrides=spacing)
        except (ValueError, TypeError) as error:
            raise RequestRejectedError(f"structured_outputs: {error}") from error
        return matcher(self._vocabulary, source, log_level=0)

    def _enforceable(self, rule: SchemaRule) -> dict[str, Any]:
        schema, lost = relax(json.loads(str(rule.schema)))
        self._refuse_or_tell(rule, lost)
        return prepare_schema(schema)

    def _problem_of(self, schema: dict[str, Any]) -> str | None:
        matcher = _llguidance().LLMatcher
        problem = matcher.validate_grammar(matcher.grammar_from_json_schema(schema), self._vocabulary)
        return _line(problem) or None

    def _refuse_or_tell(self, rule: SchemaRule, lost: Sequence[Unenforced]) -> None:
        for part in lost:
            if rule.strict or (part.invalid and not rule.foreign):
                fix = "" if part.invalid else "; it is left out where strict is False"
                raise RequestRejectedError(f"{rule.label}: {part}{fix}")
            key = (rule.label, part.keyword)
            if key not in self._told:
                if len(self._told) >= _MAX_TOLD:
                    self._told.clear()
                self._told.add(key)
                logger.warning("%s: %s; outputs are not held to it", rule.label, part)

    def _open(self, llguidance: Any) -> None:
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend", None)
        if tokenizer is None or backend is None:
            raise RequestRejectedError(
                "structured_outputs needs an engine whose tokenizer is a fast tokenizer"
            )
        size = tokenizer.vocab_size
        ends = [i for i in self._eos_token_ids if i < size] or sorted(tokenizer.special_ids)[:1]
        if not ends:
            raise RequestRejectedError(
                "structured_outputs needs a model with an end-of-sequence or other special token"
            )
        self._vocabulary = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        spellings = [self._vocabulary.decode_bytes([i]) for i in range(size)]
        self._order = ClosingOrder(spellings, sorted(tokenizer.special_ids))


class Grammar:
    """One compiled grammar: a matcher at its start, to be copied, and what its sequences share."""

    def __init__(self, start: Any, order: ClosingOrder, words: Words, eos: int) -> None:
        self._closings = Closings(order, words, eos)
        self._start = start
        self._lock = threading.Lock()
        self._shortest: list[int] | None = None
        self._searched = False

    def open(self, max_tokens: int, stop_ids: Sequence[int], ignored_ids: Sequence[int] = ()) -> GrammarState:
        """The state of a new request. stop_ids: tokens that end it. ignored_ids: end-of-sequence ids that do not.

        Raises :class:`RequestRejectedError` if a complete output is known not to fit ``max_tokens``. (For some patterns
        no path to an end is found in advance; such an output may be cut at max_tokens until one turns up.)
        """
        with self._lock:
            if not self._searched:
                self._shortest = self._closings.find(self._start)
                self._searched = True
            path = self._shortest
            if path is not None and len(path) > max_tokens:
                path = self._closings.find(self._start, max_tokens)
                if path is None:
                    raise RequestRejectedError(
                        f"structured_outputs needs max_tokens of at least {len(self._shortest or ())} for a complete "
                        f"output, got {max_tokens}"
                    )
            start = self._start.deep_copy()
        return GrammarState(self._closings, start, path, max_tokens, tuple(stop_ids), tuple(ignored_ids))


def _rules(wanted: StructuredOutputs) -> Sequence[SchemaRule]:
    if wanted.json_object:
        return [SchemaRule("start", {"type": "object"}, "structured_outputs.json_object")]
    if wanted.json is not None:
        return [SchemaRule("start", wanted.json, "structured_outputs.json", wanted.strict)]
    return wanted.schemas


def _words(wanted: StructuredOutputs, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Texts that the grammar's regexes match."""
    found = [] if wanted.regex is None else regex_words(wanted.regex)
    found += lark_words(wanted.grammar or "")
    for schema in schemas:
        found += schema_words(schema)
    return found


def _spacing(wanted: StructuredOutputs) -> dict[str, Any]:
    return {
        "whitespace_flexible": False,
        "item_separator": wanted.item_separator,
        "key_separator": wanted.key_separator,
        "json_allowed_escapes": '"\\bfnrt',  # no \u: text comes as itself
    }


def _line(problem: str) -> str:
    return " ".join(problem.split())


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestRejectedError(
            "structured_outputs needs llguidance: pip install 'llguidance>=1.9'"
        ) from error
    return llguidance
