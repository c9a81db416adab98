"""What a caller may hand in as a prompt, and the checks that need a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.errors import RequestRejectedError
from paged_backend.sampling_params import SamplingParams
from paged_backend.token_ids import as_token_ids, is_number, plain
from paged_backend.tokenization import Tokenizer, needed

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list, tuple, array or tensor of one dimension), or ``{"prompt": text}`` /
``{"prompt_token_ids": ids}`` (with both, the text is only shown)."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids")


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a sequence of prompts -> list.

    A flat sequence of ids is one prompt, whatever it is made of; each row of two dimensions is one. Raises
    :class:`RequestRejectedError` for what is neither.
    """
    prompts = plain(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)):
        raise RequestRejectedError("a prompt must be text, got bytes: decode them first")
    try:
        items = [plain(item) for item in prompts]
    except TypeError:
        raise RequestRejectedError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}"
        ) from None
    numbers = [place for place, item in enumerate(items) if is_number(item)]
    if not numbers:
        return items
    if len(numbers) < len(items):
        other = next(item for item in items if not is_number(item))
        raise RequestRejectedError(
            f"prompts must be one list of token ids or a list of prompts, got {items[numbers[0]]!r:.40} beside "
            f"{other!r:.40}"
        )
    return [as_token_ids(items, "token ids of a prompt")]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """(text or None, token ids). Raises :class:`RequestRejectedError` for anything else than a :data:`Prompt`."""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _PROMPT_KEYS]
        if unknown:
            hint = ": give its input_ids" if unknown[0] == "input_ids" else ""
            raise RequestRejectedError(
                f"a prompt dict has 'prompt' or 'prompt_token_ids', and this engine knows no {unknown[0]!r}{hint}"
            )
        if prompt.get("prompt_token_ids") is not None:
            return prompt.get("prompt"), as_token_ids(prompt["prompt_token_ids"], "prompt_token_ids")
        if "prompt" not in prompt:
            raise RequestRejectedError("a prompt dict needs 'prompt' or 'prompt_token_ids'")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        token_ids = needed(tokenizer).encode(prompt)
        if not token_ids:
            raise RequestRejectedError(
                "the prompt is empty (it encodes to no tokens): give at least one token"
            )
        return prompt, token_ids
    prompt = plain(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return None, as_token_ids(prompt, "token ids of a prompt")
    raise RequestRejectedError(
        f"a prompt must be text, token ids or a dict with one of them, got {prompt!r:.80}"
    )


def check_token_options(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> list[tuple[int, ...]]:
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
            ids = tuple(needed(tokenizer).encode(text, add_special_tokens=False))
            if ids and ids not in words:
                words.append(ids)
    return words
