"""From a request's fields to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.sampling_params import BeamSearch, SamplingParams
from paged_backend.server.wire.errors import ApiError
from paged_backend.server.wire.schema import Sampling

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "prompt_logprobs", "priority",
)  # fmt: skip
MAX_LISTED = 1 << 20
"""Logprobs that one answer may list where all of the vocabulary is asked for: about 300 MB while it is made."""
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


def to_params(body: Sampling, **own: Any) -> SamplingParams:
    """The parameters of ``body``; ``own`` are those that the routes name differently. Raises ApiError, ValueError."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    given.update({name: value for name, value in own.items() if value is not None})
    stops = [given["stop"]] if isinstance(given.get("stop"), str) else given.get("stop", ())
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise ApiError(
            400, f"stop must be at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters", param="stop",
            code="invalid_value",
        )  # fmt: skip
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    _add_beams(given, body)
    return SamplingParams(**given)


def check_listed(params: SamplingParams, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse to list all of the vocabulary for more tokens than memory is there for."""
    for name, tokens in (
        ("logprobs", len(prompts) * params.n * (params.max_tokens or 1)),
        ("prompt_logprobs", sum(map(len, prompts))),
    ):
        if getattr(params, name) == -1 and tokens * vocab_size > MAX_LISTED:
            raise ApiError(
                400, f"{name} of all {vocab_size} tokens of the vocabulary are given for at most "
                f"{MAX_LISTED // vocab_size} tokens, this request has {tokens}: ask for the 20 most likely", param=name,
                code="invalid_value",
            )  # fmt: skip


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise ApiError(
                400, f"logit_bias must map token ids to numbers, got {token[:40]!r}", param="logit_bias",
                code="invalid_value",
            )  # fmt: skip
        bias[int(token)] = value
    return bias


def _add_beams(given: dict[str, Any], body: Sampling) -> None:
    options = ("num_beams", "length_penalty", "early_stopping")
    if not body.use_beam_search:
        for name in options:
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} needs use_beam_search", param=name, code="invalid_value")
        return
    n = given.get("n", 1)
    chosen = {name: getattr(body, name) for name in options[1:] if getattr(body, name) is not None}
    given["beam_search"] = BeamSearch(body.num_beams or max(n, 2), **chosen)
    given.setdefault("temperature", 0.0)
