"""What a caller may hand in as a prompt, and the checks that need a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` (with both, the text is only shown)."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a sequence of prompts -> list. A flat sequence of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)):
        raise RequestRejectedError("a prompt must be text, got bytes: decode them first")
    try:
        items = list(prompts)
    except TypeError:
        raise RequestRejectedError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}"
        ) from None
    if items and all(_is_id(item) for item in items):
        return [[int(item) for item in items]]
    return items


def encode_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str | None, list[int]]:
    """(text or None, token ids). Raises :class:`RequestRejectedError` for anything else than a :data:`Prompt`."""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _PROMPT_KEYS]
        if unknown:
            raise RequestRejectedError(
                f"a prompt dict has 'prompt' or 'prompt_token_ids', and this engine knows no {unknown[0]!r}"
            )
        if prompt.get("prompt_token_ids") is not None:
            text, prompt = prompt.get("prompt"), prompt["prompt_token_ids"]
            return text, encode_prompt(prompt, tokenizer)[1]
        if "prompt" not in prompt:
            raise RequestRejectedError("a prompt dict needs 'prompt' or 'prompt_token_ids'")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestRejectedError("this engine has no tokenizer: give token ids")
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise RequestRejectedError(
                "the prompt is empty (it encodes to no tokens): give at least one token"
            )
        return prompt, token_ids
    if (isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))) or hasattr(
        prompt, "tolist"
    ):
        items: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if all(_is_id(item) for item in items):
            return None, [int(item) for item in items]
    raise RequestRejectedError(
        f"a prompt must be text, token ids or a dict with one of them, got {prompt!r:.80}"
    )


def _is_id(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)


def check_token_options(params: SamplingParams, tokenizer: Any, vocab_size: int) -> list[tuple[int, ...]]:
    """Check ids in ``params`` against the vocabulary; returns the token sequences of ``bad_words``."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise RequestRejectedError(
                    f"{name} has id {token}, outside the vocabulary of {vocab_size} ids"
                )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestRejectedError(f"logprobs={params.logprobs} exceeds the vocabulary of {vocab_size} ids")
    if params.prompt_logprobs is not None and params.prompt_logprobs > vocab_size:
        raise RequestRejectedError(
            f"prompt_logprobs={params.prompt_logprobs} exceeds the vocabulary of {vocab_size}"
        )
    if tokenizer is None and (params.bad_words or params.stop):
        raise RequestRejectedError("stop and bad_words need a tokenizer: use stop_token_ids or logit_bias")
    words: list[tuple[int, ...]] = []
    for word in params.bad_words or ():
        # a word is another token at the start of a text than after a space: ban both
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and ids not in words:
                words.append(ids)
    return words
