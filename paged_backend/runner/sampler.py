"""Sampler: one token per row of logits, each row a function of that row alone.

The processors follow transformers' ``LogitsProcessor`` definitions and order (repetition penalty, then the
additive penalties, biases and masks, then temperature, top-k, top-p, min-p); minimum length, the output-only
penalties and raw-logit logprobs follow vLLM. Every row is computed by itself, in numpy, in a fixed order of
operations: its result cannot depend on the other rows, on how many there are, or on the number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from paged_backend.errors import RequestFailedError, call_user
from paged_backend.kernels.array import Array
from paged_backend.runner.history import TokenHistory
from paged_backend.sampling_params import SamplingParams

_BLOCK = 256  # width of the blocks that maxima and sums are taken over first


class Constraint(Protocol):
    """A grammar at one sequence's place, as the sampler sees it."""

    def mask(self) -> Array:
        """Bool [<= V], True where a token is allowed; ids past its end are not."""

    def settle(self, token: int) -> int:
        """The token to take where ``token`` was drawn; another one if the output could not be completed after it."""


@dataclass(slots=True)
class SampleRow:
    """What a row of logits is sampled with; read, never changed.

    params: resolved, so no None in the fields of ``sampling_params.DEFAULTS``.
    history: the sequence's tokens, of which ``num_output_tokens`` are output so far.
    seed: any int. The noise of a token is a function of (seed, num_output_tokens).
    stop_ids: not sampled while ``num_output_tokens < params.min_tokens``: every end-of-sequence id of the
    model (not only the tokenizer's) and the request's stop_token_ids.
    bad_words_ids: token sequences whose last token is barred when the context ends with the tokens before it.
    constraint: what a grammar allows here, None without one.
    candidates: in a beam search, how many continuations to propose instead of sampling one.
    """

    params: SamplingParams
    history: TokenHistory
    num_output_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    candidates: int = 0


@dataclass(slots=True)
class Sampled:
    """One sampled (or scored) token.

    logprob: of the raw logits, None unless asked for. rank: 1 for the most likely; equal logits rank by id.
    top: the most likely (id, logprob, rank), best first; empty for ``logprobs=0``, None when not asked for. Of a row
    with ``candidates`` these are the continuations, their log-probabilities processed, and token_id the first.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: list[tuple[int, float, int]] | None = None


class Sampler:
    """Stateless; may be shared between engines and threads."""

    def sample(self, logits: Array, rows: Sequence[SampleRow]) -> list[Sampled | Exception]:
        """Sample one token per row.

        logits: float16, float32 or float64 [R, V], left as it is (taken as float32); a device's are brought here first.
        Returns R items: a :class:`Sampled`, or the error of that row alone, :class:`RequestFailedError` for
        logits that are not finite, for a distribution with every token masked and for ids outside the
        vocabulary. Raises ValueError when ``rows`` and ``logits`` do not match.
        """
        _check_shape(logits, len(rows))
        if not rows:
            return []
        if all(_plain(row) for row in rows):
            return _greedy(logits)
        return [self._guarded(values, row) for values, row in zip(_float32(logits), rows)]

    def prompt_logprobs(self, logits: Array, next_ids: Sequence[int], k: int) -> list[Sampled]:
        """Score given tokens.

        logits: as for :meth:`sample`, [P, V]; ``next_ids[i]`` is the token that followed position i; the k >= 0
        most likely tokens are listed per position. Raises RequestFailedError for logits that are not finite.
        """
        _check_shape(logits, len(next_ids))
        return [_score(values, int(token), k) for values, token in zip(_float32(logits), next_ids)]

    def _guarded(self, raw: Array, row: SampleRow) -> Sampled | Exception:
        try:
            # Overflow to -inf is meant: a temperature near zero leaves only the maximum.
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                if not row.params.logits_processors:  # these may be there to repair such logits
                    _finite_max(raw)
                if row.candidates:
                    return _propose(raw, row)
                values = _process(raw, row) if _processed(row) else raw
                token = int(values.argmax()) if row.params.greedy else _draw(values, row)
                if row.constraint is not None:
                    token = row.constraint.settle(token)
                if row.params.logprobs is None:
                    return Sampled(token)
                return _score(raw, token, row.params.logprobs)
        except Exception as error:  # the culprit gets its error, its batch-mates their tokens
            return error


def uniform(seed: int, position: int) -> float:
    """The noise of one token: a float in [0, 1) with 53 random bits, a pure function of (seed, position)."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def only_truncates(row: SampleRow) -> bool:
    """Whether temperature, top-k, top-p and min-p are all that a row asks for."""
    return only_penalises(row) and not penalised(row)


def only_penalises(row: SampleRow) -> bool:
    """Whether these and the three penalties are all: then a device that knows the tokens can draw it by itself."""
    return row.params.logprobs is None and not row.candidates and not _masked(row)


def penalised(row: SampleRow) -> bool:
    """Whether a repetition, frequency or presence penalty applies."""
    p = row.params
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


def _plain(row: SampleRow) -> bool:
    return row.params.greedy and only_truncates(row)


def _check_shape(logits: Array, rows: int) -> None:
    if logits.ndim != 2 or logits.shape[0] != rows:
        raise ValueError(f"logits must be [{rows}, V] for {rows} rows, got {list(logits.shape)}")


def _float32(logits: Array) -> Array:
    return np.ascontiguousarray(logits, np.float32)


def _greedy(logits: Array) -> list[Sampled | Exception]:
    values = _float32(logits)
    ids = values.argmax(-1).tolist()  # the first of equal maxima; a NaN counts as the maximum
    good = np.isfinite(values[np.arange(len(ids)), ids]).tolist()
    return [Sampled(token) if ok else not_finite() for token, ok in zip(ids, good)]


def not_finite() -> RequestFailedError:
    """The error of a row whose logits are not finite."""
    return RequestFailedError(
        "the model gave logits that are not finite (NaN, inf or all -inf): check the weights and precision"
    )


def _finite_max(values: Array) -> np.float32:
    best = values.max()  # NaN if there is one anywhere
    if not np.isfinite(best):
        raise not_finite()
    return best


# -------------------------------------------------------------------------------- penalties, biases, masks


def _processed(row: SampleRow) -> bool:
    """Whether anything but temperature and truncation applies to this row now."""
    return penalised(row) or _masked(row)


def _masked(row: SampleRow) -> bool:
    """Whether its logits are changed by anything but the penalties."""
    p = row.params
    return (
        bool(p.logit_bias)
        or p.allowed_token_ids is not None
        or bool(row.bad_words_ids)
        or row.constraint is not None
        or bool(p.logits_processors)
        or row.num_output_tokens < p.min_tokens
    )


def _process(raw: Array, row: SampleRow) -> Array:
    p, values = row.params, raw.copy()
    vocab = len(values)
    if p.repetition_penalty is not None and p.repetition_penalty != 1.0:
        ids = row.history.context_ids(row.num_output_tokens)
        ids = ids[(ids >= 0) & (ids < vocab)]  # placeholders of other modalities have no logit to change
        score = values[ids]
        values[ids] = np.where(score < 0, score * p.repetition_penalty, score / p.repetition_penalty)
    if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
        ids, counts = row.history.output_counts(row.num_output_tokens)
        values[ids] -= (p.frequency_penalty * counts + p.presence_penalty).astype(np.float32)
    if p.logit_bias:
        ids = _checked("logit_bias", tuple(p.logit_bias), vocab)
        values[ids] += np.fromiter(p.logit_bias.values(), np.float32, len(ids))
    if row.num_output_tokens < p.min_tokens:
        values[[i for i in row.stop_ids if 0 <= i < vocab]] = -np.inf
    if p.allowed_token_ids is not None:
        ids = _checked("allowed_token_ids", p.allowed_token_ids, vocab)
        kept = values[ids]
        values.fill(-np.inf)
        values[ids] = kept
    for word in row.bad_words_ids:
        if word and 0 <= word[-1] < vocab and row.history.ends_with(word[:-1], row.num_output_tokens):
            values[word[-1]] = -np.inf
    if row.constraint is not None:
        allowed = row.constraint.mask()[:vocab]
        np.copyto(values[: len(allowed)], -np.inf, where=~allowed)
        values[len(allowed) :] = -np.inf
    for processor in p.logits_processors:
        output = row.history.output(row.num_output_tokens)
        values = call_user(processor, row.history.prompt(), output, values)
        if getattr(values, "shape", None) != (vocab,):
            raise RequestFailedError(f"a logits processor must return an array of {vocab} logits")
    if not np.isfinite(values.max()):
        raise RequestFailedError(
            "no token is left to sample: allowed_token_ids, bad_words, logit_bias, min_tokens, the grammar and "
            "logits_processors together mask the whole vocabulary, or a penalty overflowed; relax one of them"
        )
    return values


def _checked(name: str, ids: Sequence[int], vocab: int) -> Array:
    array = np.array(ids, np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < vocab:
        raise RequestFailedError(f"{name} has an id outside the vocabulary of {vocab}: {array.max()}")
    return array


# -------------------------------------------------------------------------------- drawing and scoring


def _draw(values: Array, row: SampleRow) -> int:
    """Temperature, top-k, top-p, min-p, then the inverse CDF in the order of token ids."""
    p = row.params
    ids: Array | None = None
    best = values.max()
    if p.top_k and 0 < p.top_k < len(values):
        ids = _top_set(values, p.top_k)
        values = values[ids]
    # Shifted by the maximum first, so that a tiny temperature cannot overflow upwards.
    scaled = (values - best) / max(p.temperature or 0.0, 1e-30)
    weights = np.exp(scaled)
    kept: Array | None = None
    if p.top_p is not None and p.top_p < 1.0:
        kept = _nucleus(scaled, weights, p.top_p)
    if p.min_p:
        likely = weights >= np.float32(p.min_p)  # the largest weight is exactly 1
        kept = likely if kept is None else kept & likely
    if kept is not None:
        inside = np.flatnonzero(kept)
        ids, weights = inside if ids is None else ids[inside], weights[inside]
    noise = uniform(row.seed, row.num_output_tokens)
    picked = _cross(weights, noise * float(weights.sum()), "right")
    return picked if ids is None else int(ids[picked])


def _propose(raw: Array, row: SampleRow) -> Sampled:
    """The likeliest continuations of a beam; penalties and masks apply to log-probabilities, as in transformers."""
    shifted = raw.astype(np.float64) - raw.max()
    values = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    if _processed(row):
        values = _process(values, row)
    ids = _top_set(values, row.candidates) if row.candidates < len(values) else np.arange(len(values))
    ids = ids[np.argsort(-values[ids], kind="stable")[: row.candidates]]
    top = [(int(token), float(values[token]), rank) for rank, token in enumerate(ids, 1)]
    return Sampled(top[0][0], top=top)


def _top_set(values: Array, k: int) -> Array:
    """Ids, ascending, of every value that is at least the k-th largest (so more than k on a tie)."""
    size, blocks = len(values), len(values) // _BLOCK
    if 2 * k > blocks:
        return np.flatnonzero(values >= np.partition(values, size - k)[size - k])
    # The k-th largest block maximum has k values at or above it, so it is a lower bound of the k-th value;
    # few values pass it.
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(1)
    ids = np.flatnonzero(values >= np.partition(maxima, blocks - k)[blocks - k])
    values = values[ids]
    return ids[values >= np.partition(values, len(values) - k)[len(values) - k]]


def _nucleus(scaled: Array, weights: Array, top_p: float) -> Array:
    """Bool [n]: the fewest most likely tokens whose mass reaches top_p; of equal ones the lower ids.

    A token belongs to it if the mass of those more likely is below top_p. Tokens below (1 - top_p) / n each
    add up to less than 1 - top_p however many they are, so only the others are sorted (0.5: for rounding).
    """
    total = float(weights.sum())
    order = np.sort(np.compress(weights >= 0.5 * (1.0 - top_p) * total / len(weights), scaled))[::-1]
    count = _cross(np.exp(order), top_p * total, "left") + 1
    threshold = order[count - 1]
    kept = scaled >= threshold
    excess = int(np.count_nonzero(kept)) - count
    if excess > 0:
        kept[np.flatnonzero(scaled == threshold)[-excess:]] = False
    return kept


def _cross(weights: Array, target: float, side: Literal["left", "right"]) -> int:
    """First index whose running sum reaches (left) or exceeds (right) the target; weights float32 [n] >= 0.

    When rounding leaves the total short of the target: the last index that has a weight.
    """
    start = 0
    if len(weights) > 4 * _BLOCK:  # which block, then where in it: far cheaper than one long running sum
        mass = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
        block = _find(mass, target, side)
        target -= float(mass[block - 1]) if block else 0.0
        start = block * _BLOCK
        weights = weights[start : start + _BLOCK]
    return start + _find(np.cumsum(weights, dtype=np.float64), target, side)


def _find(mass: Array, target: float, side: Literal["left", "right"]) -> int:
    index = int(np.searchsorted(mass, target, side))
    return index if index < len(mass) else int(np.searchsorted(mass, mass[-1]))


def _score(raw: Array, token: int, k: int) -> Sampled:
    """Logprob and rank of a token, and of the k best, under softmax of the raw float32 logits."""
    if not 0 <= token < len(raw):
        raise RequestFailedError(f"token id {token} is outside the vocabulary of {len(raw)}")
    best = _finite_max(raw)
    log_sum = np.log(np.exp(raw - best).sum())
    top: list[tuple[int, float, int]] = []
    if k > 0:
        ids = _top_set(raw, k) if k < len(raw) else np.arange(len(raw))
        ids = ids[np.argsort(-raw[ids], kind="stable")[:k]]
        logprobs = raw[ids] - best - log_sum
        top = list(zip(ids.tolist(), logprobs.tolist(), range(1, k + 1)))
        for listed, logprob, rank in top:
            if listed == token:
                return Sampled(token, logprob, rank, top)
    value = raw[token]
    above = np.count_nonzero(raw > value) + np.count_nonzero(raw[:token] == value)
    return Sampled(token, float(value - best - log_sum), 1 + int(above), top)
