"""CompletionState: tokens in, text, logprobs and finish reason out, always in step with each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from paged_backend.outputs import CompletionOutput, Hypothesis, Logprob
from paged_backend.sampling_params import SamplingParams
from paged_backend.text.detokenizer import IncrementalDetokenizer
from paged_backend.text.stop_strings import StopMatcher
from paged_backend.tokenization import Decoder

if TYPE_CHECKING:
    from paged_backend.runner.sampler import Sampled


class CompletionState:
    """One sampled continuation of a request while it grows.

    params: resolved. prompt_token_ids: the left neighbours of the first token. stop_ids: tokens that stand
    for an end and not for text. The tokenizer may be None where ``params.detokenize`` is False and the text
    stays empty; ValueError otherwise.
    ``token_ids`` and the logprobs always have one entry per token generated, the one that ended it included.
    """

    __slots__ = (
        "_cumulative",
        "_detokenizer",
        "_logprobs",
        "_matcher",
        "_num_resumed",
        "_params",
        "_pieces",
        "_sent_pieces",
        "_sent_tokens",
        "_stop_ids",
        "_tokenizer",
        "_unseen",
        "beam",
        "finish_reason",
        "index",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Decoder | None,
        prompt_token_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.beam: Hypothesis | None = None
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            if tokenizer is None:
                raise ValueError("detokenize=True needs a tokenizer: pass one or set detokenize=False")
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens
            )
        stops = params.stop_strings
        through: tuple[str, ...] = ()
        if tokenizer is not None and params.skip_special_tokens:
            through = tuple(stop for stop in stops if tokenizer.overlaps_special(stop))
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output, through)
        self._unseen: Collection[int] = tokenizer.special_ids if through and tokenizer is not None else ()
        self._pieces: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._stop_ids = frozenset(stop_ids)
        self._num_resumed = 0
        self._sent_pieces = 0
        self._sent_tokens = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def _num_tokens(self) -> int:
        return self._num_resumed + len(self.token_ids)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take in the output that an earlier run of the same request has given already, before any :meth:`append`.

        Text, stop strings and min_tokens go on from it; everything given out from here on is what comes after it.
        """
        self._num_resumed = len(token_ids)
        if self._detokenizer is not None:
            for count, token_id in enumerate(token_ids, 1):
                can_stop = count > self._params.min_tokens
                self._matcher.push(self._text(token_id), can_stop, token_id in self._unseen)

    def append(
        self, sampled: Sampled, finish_reason: str | None = None, stop_reason: int | str | None = None
    ) -> bool:
        """Take in one token; True if a stop string has ended the text with it and the engine must stop.

        finish_reason: what the engine says of this token: "stop" for one of the stop_ids, whose text is then
        hidden unless ``include_stop_str_in_output``, "length" for the last one allowed, None to go on.
        A stop string that the token completes takes precedence. Tokens after the end are ignored.
        Raises ValueError if logprobs were asked for and the token has none.
        """
        if self.finished:
            return False
        if self._logprobs is not None:
            if sampled.logprob is None:
                raise ValueError("the request asks for logprobs, but the token was sampled without")
            self._logprobs.append(logprob_dict(sampled, self._tokenizer))
            self._cumulative += sampled.logprob
        self.token_ids.append(sampled.token_id)
        if self._detokenizer is not None:
            hidden = finish_reason == "stop" and sampled.token_id in self._stop_ids
            shown = self._params.include_stop_str_in_output or not hidden
            if shown and self._show(self._text(sampled.token_id), sampled.token_id in self._unseen):
                return True
        return finish_reason is not None and self._end(finish_reason, stop_reason)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End it without a further token ("abort", "error", "length"); text held back comes out.

        Does nothing when it has ended already.
        """
        if not self.finished:
            self._end(reason, stop_reason)

    def snapshot(self) -> CompletionOutput:
        """Everything so far, as a copy that later tokens do not change."""
        return self._output(0, 0)

    def delta(self) -> CompletionOutput:
        """What is new since the last call. Text held back comes with a later delta than its tokens.

        ``cumulative_logprob``, ``finish_reason`` and ``stop_reason`` are those of the whole, as in a
        snapshot.
        """
        output = self._output(self._sent_pieces, self._sent_tokens)
        self._sent_pieces, self._sent_tokens = len(self._pieces), len(self.token_ids)
        return output

    def _output(self, first_piece: int, first_token: int) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            "".join(self._pieces[first_piece:]),
            self.token_ids[first_token:],
            None if self._logprobs is None else self._cumulative,
            None if self._logprobs is None else self._logprobs[first_token:],
            self.finish_reason,
            self.stop_reason,
            self.beam,
        )

    def _text(self, token_id: int) -> str:
        """The text that came with a token; that of a special token too, where a stop string asks for it."""
        if self._detokenizer is None or self._tokenizer is None:
            return ""
        if token_id in self._unseen:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._detokenizer.push(token_id)

    def _show(self, text: str, hidden: bool = False) -> bool:
        """Pass new text through the stop strings; True if one matched."""
        # As with end-of-sequence tokens, the first min_tokens tokens cannot end the output.
        emitted, matched = self._matcher.push(text, self._num_tokens > self._params.min_tokens, hidden)
        if emitted:
            self._pieces.append(emitted)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        return matched is not None

    def _end(self, reason: str, stop_reason: int | str | None) -> bool:
        if self._detokenizer is not None:
            if self._show(self._detokenizer.flush()):
                return True
            held = self._matcher.flush()
            if held:
                self._pieces.append(held)
        self.finish_reason, self.stop_reason = reason, stop_reason
        return False


def logprob_dict(sampled: Sampled, tokenizer: Decoder | None) -> dict[int, Logprob]:
    """{token id: Logprob} of one position: the sampled (or given) token first, then the most likely ones."""

    def make(token: int, logprob: float, rank: int | None) -> Logprob:
        if tokenizer is None:
            return Logprob(logprob, rank)
        text, own = tokenizer.decode([token], skip_special_tokens=False), tokenizer.token_bytes(token)
        return Logprob(logprob, rank, text, None if own == text.encode() else own)

    entry: dict[int, Logprob] = {}
    if sampled.logprob is not None:
        entry[sampled.token_id] = make(sampled.token_id, sampled.logprob, sampled.rank)
    for token, logprob, rank in sampled.top or ():
        if token not in entry:
            entry[token] = make(token, logprob, rank)
    return entry
