"""From StructuredOutputs to the tokens a request may take next: compiled once per engine, one state per sequence.

A sampled token passes only if the output can still be completed behind it within ``max_tokens``; otherwise the first
token of a known closing path takes its place (``closing.py``). So the invariant "remaining tokens >= length of the
known path" holds from submit to the end, and every constrained output is complete.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from paged_backend.constrain.closing import ClosingOrder, allowed_tokens, find_closing
from paged_backend.constrain.options import StructuredOutputs
from paged_backend.constrain.schema import prepare_schema
from paged_backend.errors import RequestFailedError, RequestRejectedError

Array = np.ndarray[Any, Any]
_MAX_GRAMMARS = 64  # compiled grammars an engine keeps
_MAX_PATHS = 6  # closing paths a grammar remembers
_NEAR = 16  # tokens that it looks ahead where no path is known
_SEARCH_LIMIT = (
    1024  # longest path looked for between two tokens; behind that a token counts as leading nowhere
)


class GrammarCompiler:
    """Compiles for one tokenizer; keeps what it has compiled. Safe from any thread. Everything is built on first use.

    eos_token_ids: end of sequence of the model, which only an allowed end lets through.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._vocabulary: Any = None
        self._order: ClosingOrder | None = None

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
        matcher = llguidance.LLMatcher
        try:
            if wanted.json is not None or wanted.json_object:
                schema = json.loads(wanted.json) if isinstance(wanted.json, str) else {"type": "object"}
                spacing = {
                    "whitespace_flexible": False,
                    "item_separator": wanted.item_separator,
                    "key_separator": wanted.key_separator,
                    "json_allowed_escapes": '"\\bfnrt',  # no \u: text comes as itself
                }
                source = matcher.grammar_from_json_schema(prepare_schema(schema), overrides=spacing)
            elif wanted.regex is not None:
                source = matcher.grammar_from_regex(wanted.regex)
            elif wanted.choice is not None:
                source = matcher.grammar_from_lark("start: " + " | ".join(map(lark_text, wanted.choice)))
            else:
                source = matcher.grammar_from_lark(_lark(wanted.grammar or ""))
        except (ValueError, TypeError) as error:
            raise RequestRejectedError(f"structured_outputs: {error}") from error
        start = matcher(self._vocabulary, source, log_level=0)
        if start.is_error():
            problem = " ".join(start.get_error().split())
            raise RequestRejectedError(f"structured_outputs cannot be compiled: {problem}")
        if self._order is None:
            raise RuntimeError("the vocabulary was not opened")
        return Grammar(start, self._order, self._vocabulary.eos_token)

    def _open(self, llguidance: Any) -> None:
        backend = getattr(self._tokenizer, "backend", None)
        if backend is None:
            raise RequestRejectedError(
                "structured_outputs needs an engine whose tokenizer is a fast tokenizer"
            )
        size = self._tokenizer.vocab_size
        ends = [i for i in self._eos_token_ids if i < size] or sorted(self._tokenizer.special_ids)[:1]
        if not ends:
            raise RequestRejectedError(
                "structured_outputs needs a model with an end-of-sequence or other special token"
            )
        self._vocabulary = llguidance.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        spellings = [self._vocabulary.decode_bytes([i]) for i in range(size)]
        self._order = ClosingOrder(spellings, sorted(self._tokenizer.special_ids))


class Grammar:
    """One compiled grammar: a matcher at its start, to be copied, and closing paths that were found useful."""

    def __init__(self, start: Any, order: ClosingOrder, eos: int) -> None:
        self.order = order
        self.eos = eos
        self.paths: tuple[tuple[int, ...], ...] = ()
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
                self._shortest = find_closing(self._start, self.order, self.eos, _SEARCH_LIMIT)
                self._searched = True
            path = self._shortest
            if path is not None and len(path) > max_tokens:
                path = find_closing(self._start, self.order, self.eos, max_tokens)
                if path is None:
                    raise RequestRejectedError(
                        f"structured_outputs needs max_tokens of at least {len(self._shortest or ())} for a complete "
                        f"output, got {max_tokens}"
                    )
            return GrammarState(
                self, self._start.deep_copy(), path, max_tokens, tuple(stop_ids), tuple(ignored_ids)
            )

    def remember(self, path: Sequence[int]) -> None:
        """Keep a path for :meth:`GrammarState.settle` to try first."""
        new = tuple(path)
        if new and new not in self.paths:
            self.paths = (new, *self.paths[: _MAX_PATHS - 1])


class GrammarState:
    """Where one sequence stands. Used by the engine's loop thread, and by its mask thread while a step computes."""

    __slots__ = (
        "_future", "_grammar", "_ignored", "_mask", "_matcher", "_next", "_path", "_remaining", "_stop_ids",
    )  # fmt: skip

    def __init__(
        self,
        grammar: Grammar,
        matcher: Any,
        path: list[int] | None,
        max_tokens: int,
        stop_ids: tuple[int, ...],
        ignored_ids: tuple[int, ...],
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._path = path
        self._remaining = max_tokens
        self._stop_ids = stop_ids
        self._ignored = ignored_ids
        self._mask: Array | None = None
        self._future: Future[Array] | None = None
        self._next: tuple[int, list[int] | None] | None = None

    def fork(self) -> GrammarState:
        """A second sequence that goes on from here."""
        self._wait()
        copy = self._matcher.deep_copy()
        return GrammarState(self._grammar, copy, self._path, self._remaining, self._stop_ids, self._ignored)

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the output is complete and must stop."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """Whether the output as it stands satisfies the grammar."""
        return self._matcher.is_accepting()

    def prepare(self, pool: Executor) -> None:
        """Fill the mask in ``pool`` while the caller does something else; :meth:`mask` waits for it."""
        if self._mask is None and self._future is None:
            self._future = pool.submit(self._fill)

    def mask(self) -> Array:
        """Bool over the vocabulary, True where a token may come next. Not to be changed by the caller."""
        if self._mask is None:
            future, self._future = self._future, None
            self._mask = self._fill() if future is None else future.result()
        return self._mask

    def _wait(self) -> None:
        """The matcher has one user at a time: whoever never asked for the mask still lets the filling end."""
        if self._future is not None:
            self.mask()

    def _fill(self) -> Array:
        allowed = allowed_tokens(self._matcher, self._grammar.order.size).copy()
        if self._matcher.is_error():
            raise RequestFailedError(f"the grammar cannot go on: {self._matcher.get_error()}")
        # any token that ends the output would cut it, so all of them wait for an allowed end, not only the tokenizer's
        ends = [i for i in self._stop_ids if i < len(allowed)]
        allowed[ends] = self._matcher.is_accepting()
        allowed[[i for i in self._ignored if i < len(allowed)]] = False
        return allowed

    def settle(self, token: int) -> int:
        """``token`` if the output can still be completed in time behind it, else the next token on the way to an end.

        Changes nothing that a second call would notice: a failed step may be sampled again.
        """
        self._wait()
        ends = token in self._stop_ids
        if ends and self._matcher.is_accepting():
            return token
        tight = self._path is not None and 0 < len(self._path) >= self._remaining
        path = None if tight or ends else self._path_behind(token)
        if path is None and self._path is not None:
            if self._path:
                token, path = self._path[0], self._path[1:]
            else:  # complete as it is, and whatever this token begins could not be completed in time
                return self._stop_ids[0] if self._stop_ids else token
        self._next = (token, path)
        return token

    def _path_behind(self, token: int) -> list[int] | None:
        limit = self._remaining - 1
        check, eos = self._matcher.validate_tokens, self._grammar.eos
        # cheap guesses first: the known path often still holds (inside a text), or a later part of one
        for known in (self._path or (), *self._grammar.paths):
            for start in range(max(0, len(known) - limit), len(known) + 1):
                rest = list(known[start:])
                if check([token, *rest, eos]) == len(rest) + 2:
                    return rest
        after = self._matcher.deep_copy()
        if not after.consume_token(token):
            return None
        if self._path is None:  # not found so far: it may be near by now
            return find_closing(after, self._grammar.order, eos, min(limit, _NEAR), broad=False)
        found = find_closing(after, self._grammar.order, eos, min(limit, _SEARCH_LIMIT), broad=False)
        if found is not None:
            self._grammar.remember(found)
        return found

    def advance(self, token: int) -> None:
        """Take in the token that was appended. Raises :class:`RequestFailedError` if the grammar does not allow it."""
        self._wait()
        self._mask = None
        chosen, self._next = self._next, None
        if token in self._stop_ids:
            return
        if not self._matcher.consume_token(token):
            problem = " ".join(self._matcher.get_error().split())[:300]
            raise RequestFailedError(f"the grammar does not allow token {token} here: {problem}")
        self._remaining -= 1
        if chosen is not None and chosen[0] == token:
            self._path = chosen[1]
        else:  # a token that never passed settle: speculated, or forced from outside
            self._path = find_closing(self._matcher, self._grammar.order, self._grammar.eos, _SEARCH_LIMIT)

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens (speculation that was not accepted)."""
        self._wait()
        if count and not self._matcher.rollback(count):
            raise RequestFailedError(
                f"the grammar cannot take back {count} tokens: {self._matcher.get_error()}"
            )
        self._remaining += count
        self._mask, self._next = None, None
        self._path = find_closing(self._matcher, self._grammar.order, self._grammar.eos, _SEARCH_LIMIT)


def lark_text(text: str) -> str:
    """A string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """Lark as it is; GBNF, which is known by its ``::=``, translated."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:
        raise ValueError(f"the GBNF grammar cannot be read: {error}") from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestRejectedError(
            "structured_outputs needs llguidance: pip install 'llguidance>=1.0'"
        ) from error
    return llguidance
