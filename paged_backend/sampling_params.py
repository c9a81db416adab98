"""SamplingParams: how one request is sampled. Names and meanings are vLLM's."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.constrain.options import StructuredOutputs
from paged_backend.neutral import FLAG, Neutral, label, never, only, without_neutral
from paged_backend.token_ids import as_token_ids


class RequestOutputKind(enum.Enum):
    """What each item of a stream holds."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


LogitsProcessor = Callable[[Sequence[int], Sequence[int], Any], Any]
"""(prompt ids, output ids, float32 numpy array [V]) -> such an array; may change and return the one it is given."""

StopCriterion = Callable[[Sequence[int], Sequence[int]], bool]
"""(prompt ids, output ids with the newest token) -> whether the output ends here, that token included."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling; definitions and results are those of transformers' ``generate``.

    num_beams: >= 2. A hypothesis scores the sum of its processed log-probabilities / length ** length_penalty.
    early_stopping: True ends when num_beams hypotheses are finished; False when the best running beam, scored at
    its present length, is behind them; "never" when no continuation up to max_tokens can beat them.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _int("num_beams", self.num_beams, 2)
        good = isinstance(self.length_penalty, (int, float)) and math.isfinite(self.length_penalty)
        _check("length_penalty", good, "a finite number", self.length_penalty)
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _check("early_stopping", known, "True, False or 'never'", self.early_stopping)


DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 256,
}
"""Used where neither the caller nor the model's generation_config says anything."""


NEUTRAL: Mapping[str, Neutral] = {
    "spaces_between_special_tokens": FLAG,
    "skip_clone": FLAG,
    "flat_logprobs": only(False, why="is not supported: logprobs are dicts"),
    "output_text_buffer_length": label(int, "a number"),
    "stream_interval": label(int, "a number of tokens"),
    "extra_args": never("is not supported: it belongs to extensions of vLLM"),
    "watermarking": never("is not supported: texts carry no watermark"),
    "logprob_token_ids": never("is not supported: take the most likely tokens' logprobs, or all with -1"),
    "prompt_logprob_token_ids": never(
        "is not supported: take the most likely tokens' logprobs, or all with -1"
    ),
    "prompt_logprob_start": only(0, why="is not supported: all of a prompt is scored"),
    "repetition_detection": never("is not supported: use repetition_penalty or frequency_penalty"),
    "thinking_token_budget": only(-1, why="is not supported: reasoning is not told from other text"),
    "truncate_prompt_tokens": never("is not supported: cut the prompt's token ids"),
    "routed_experts_prompt_start": only(0, why="is not supported: choices of experts are not reported"),
    "use_beam_search": only(False, why="is not supported: give beam_search=BeamSearch(num_beams=...)"),
    "early_stopping": only(False, why="is not supported: give beam_search=BeamSearch(...)"),
    "length_penalty": only(1.0, why="is not supported: give beam_search=BeamSearch(...)"),
}
"""Options of vLLM's class, past and present, that no result depends on."""


def _takes_neutral(cls: type[SamplingParams]) -> type[SamplingParams]:
    """Decorator: the constructor takes :data:`NEUTRAL`, and vLLM's old names, too."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: SamplingParams, *values: Any, **options: Any) -> None:
        best_of, form = options.pop("best_of", None), options.pop("guided_decoding", None)
        made(self, *values, **without_neutral(options, NEUTRAL))
        if best_of not in (None, self.n):
            raise ValueError(
                f"best_of={best_of!r} must be n={self.n}: sample n, and choose by cumulative_logprob"
            )
        if form is not None:
            _check(
                "guided_decoding", self.structured_outputs is None, "left out beside structured_outputs", form
            )
            object.__setattr__(self, "structured_outputs", StructuredOutputs.coerce(form))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_takes_neutral
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, validated at construction (``ValueError`` names field and range).

    Fields that a model's ``generation_config.json`` may set default to None, "not said":
    an explicit value wins over the generation config, which wins over :data:`DEFAULTS`.

    temperature: >= 0; 0 is greedy. top_p: (0, 1]. top_k: 0 or -1 for all, else >= 1. min_p: [0, 1].
    repetition_penalty: > 0, over prompt and output. presence_penalty, frequency_penalty: [-2, 2], over the output.
    seed: any int; equal seeds give equal results whatever else is in the batch.
    max_tokens: >= 1 new tokens (also capped by the context). min_tokens: no stop before that many new tokens.
    stop: strings that end the text. stop_token_ids: ids that do. ignore_eos: go on past end-of-sequence.
    logprobs / prompt_logprobs: number of most likely tokens to report per position besides the actual one; -1 for
        all of the vocabulary.
    logit_bias: {token id: [-100, 100]}. allowed_token_ids: nothing else is sampled. bad_words: never produced.
    logits_processors: called in this order on the logits of each step, after the penalties, biases and masks
    above and before temperature and truncation. stop_criteria: called after each token, min_tokens or not. Both
    run in the engine's own thread: they must be quick, and one that raises fails its request only.
    structured_outputs: the form the output must have, a :class:`StructuredOutputs` or a dict with its names. The
    output ends when its form is complete, and is made to be complete within max_tokens.
    beam_search: n of its hypotheses, best first, are the request's outputs; excludes sampling.
    priority: lower runs earlier.

    Options of vLLM's class that change no result here (:data:`NEUTRAL`) are taken where they ask for what is done
    anyway, ``guided_decoding`` is its old name of ``structured_outputs``.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_criteria: Sequence[StopCriterion] = ()
    beam_search: BeamSearch | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        put("stop", _strings("stop", self.stop))
        put("bad_words", _strings("bad_words", self.bad_words))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            _check("allowed_token_ids", len(self.allowed_token_ids) > 0, "at least one id, or None for all")
        if self.logit_bias is not None:
            try:
                bias = {int(token): float(value) for token, value in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError):
                raise ValueError("logit_bias must map token ids to numbers") from None
            _check("logit_bias", all(t >= 0 for t in bias), "token ids >= 0", sorted(bias)[:1])
            _check("logit_bias", all(-100 <= v <= 100 for v in bias.values()), "values in [-100, 100]", bias)
            put("logit_bias", bias)
        _int("n", self.n, 1)
        _int("min_tokens", self.min_tokens, 0)
        _int("priority", self.priority, None)
        for name, least in (
            ("max_tokens", 1),
            ("logprobs", -1),
            ("prompt_logprobs", -1),
            ("top_k", -1),
            ("seed", None),
        ):
            if getattr(self, name) is not None:
                _int(name, getattr(self, name), least)
        for name, low, high, text in (
            ("temperature", 0.0, math.inf, ">= 0 and finite"),
            ("top_p", 0.0, 1.0, "in (0, 1]"),
            ("min_p", 0.0, 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0, math.inf, "> 0 and finite"),
            ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            _check(name, good and low <= value <= high, text, value)
        _check("top_p", self.top_p is None or self.top_p > 0, "in (0, 1]", self.top_p)
        _check(
            "repetition_penalty",
            self.repetition_penalty is None or self.repetition_penalty > 0,
            "> 0 and finite",
            self.repetition_penalty,
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        for name in ("logits_processors", "stop_criteria"):
            put(name, tuple(getattr(self, name) or ()))
            _check(name, all(callable(f) for f in getattr(self, name)), "callables", getattr(self, name))
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputs.coerce(self.structured_outputs))
        if self.beam_search is not None:
            self._check_beams(self.beam_search)
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need text: set detokenize=True or use stop_token_ids")
        if not isinstance(self.output_kind, RequestOutputKind):
            put("output_kind", RequestOutputKind(self.output_kind))

    def _check_beams(self, beams: BeamSearch) -> None:
        _check("n", self.n <= beams.num_beams, f"at most num_beams ({beams.num_beams})", self.n)
        _check("temperature", not self.temperature, "0 or not given in a beam search", self.temperature)
        for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
            _check(name, getattr(self, name) is None, "None in a beam search", getattr(self, name))
        _check(
            "stop", not self.stop, "empty in a beam search: use stop_criteria or stop_token_ids", self.stop
        )

    def resolved(self, generation_config: Mapping[str, Any] | None = None) -> SamplingParams:
        """Copy with every None of :data:`DEFAULTS`' fields filled: explicit > generation config > default.

        A generation config that says ``do_sample: false`` makes temperature 0 the default, as in transformers.
        """
        config = dict(generation_config or {})
        if config.get("max_new_tokens") is not None:
            config["max_tokens"] = config["max_new_tokens"]
        if config.get("do_sample") is False:
            config["temperature"] = 0.0
        if self.beam_search is not None:
            config["temperature"] = 0.0
        values: dict[str, Any] = {}
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                values[name] = config[name] if config.get(name) is not None else default
        if self.max_tokens is None:
            values["max_tokens"] = max(values["max_tokens"], self.min_tokens)
        if self.n > 1 and values.get("temperature") == 0 and self.beam_search is None:
            values["temperature"] = DEFAULTS[
                "temperature"
            ]  # asking for several samples is asking for sampling
        return replace(self, **values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def child_seed(self, seed: int, index: int) -> int:
        """Seed of sample ``index`` of n: the request's own for 0, else a hash of (seed, index)."""
        if index == 0:
            return seed
        return (
            int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1
        )


def _check(name: str, good: bool, allowed: str, value: Any = None) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _int(name: str, value: Any, low: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and (low is None or value >= low)
    _check(name, good, "an integer" if low is None else f"an integer >= {low}", value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    _check(name, value is None or isinstance(value, (str, Iterable)), "a string or a list of strings", value)
    items = (value,) if isinstance(value, str) else tuple(() if value is None else value)
    _check(name, all(isinstance(s, str) and s for s in items), "non-empty strings", value)
    return items


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = () if value is None else tuple(as_token_ids(value, name))
    _check(name, all(index >= 0 for index in items), "token ids >= 0", value)
    return items
