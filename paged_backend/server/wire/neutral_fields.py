"""Fields of OpenAI's and vLLM's requests that change no answer here: one decision for each.

What is neither here nor a field of a body in ``schema`` is unknown, and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.neutral import FLAG, OBJECT, TEXT, Neutral, label, never, only

_TEXT_ONLY = "is not supported: this server's model reads and writes text only"
_NO_REASONING = "is not supported: reasoning is part of the answer's text here"

GENERATION: Mapping[str, Neutral] = {
    "user": TEXT,
    "session_id": TEXT,
    "safety_identifier": TEXT,
    "metadata": OBJECT,
    "prompt_cache_key": TEXT,  # prefixes are always cached, and found by their tokens
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
    "service_tier": only(
        "auto",
        "default",
        "flex",
        "scale",
        "priority",
        "fast",
        why="must be one of OpenAI's: all are served alike",
    ),
    "prediction": OBJECT,  # a guess that may make an answer come sooner
    "stream_interval": label(int, "a number of tokens"),  # pieces come as they are ready
    "spaces_between_special_tokens": FLAG,  # there are none: vLLM's fast tokenizers write none either
    "guided_decoding_backend": TEXT,  # whose grammars: there is one compiler
    "media_io_kwargs": OBJECT,  # of images and sounds, which no request can have
    "mm_processor_kwargs": OBJECT,
    "mm_payload": TEXT,
    "return_mm_kwargs": FLAG,
    "moderation": never("is not supported: this server has no moderation model"),
    "watermarking": never("is not supported: texts carry no watermark"),
    "include_reasoning": only(True, why=_NO_REASONING),
    "thinking_token_budget": only(-1, why="is not supported: reasoning is not told from other text here"),
    "logprob_token_ids": never(
        "is not supported: take logprobs of the most likely tokens, or of all with -1"
    ),
    "prompt_embeds": never("is not supported: give text or token ids"),
    "routed_experts_prompt_start": only(0, why="is not supported: choices of experts are not reported"),
    "return_token_offsets": never("is not supported: ask /tokenize"),
    "kv_transfer_params": never("is not supported: the KV cache stays in its engine"),
    "ec_transfer_params": never("is not supported: this server's model has no encoder"),
    "vllm_xargs": never("is not supported: it belongs to extensions of vLLM"),
    "repetition_detection": never("is not supported: use repetition_penalty or frequency_penalty"),
    "logits_processors": never("is not supported: the server runs no code of its clients"),
}
"""For every route that generates."""

COMPLETION: Mapping[str, Neutral] = {**GENERATION, "store": FLAG}

CHAT: Mapping[str, Neutral] = {
    **GENERATION,
    "store": FLAG,  # OpenAI's shelf of completions; there is no route that would read it
    "modalities": only(["text"], [], why=_TEXT_ONLY),
    "audio": never(_TEXT_ONLY),
    "verbosity": only(
        "medium", why="is not supported, but for 'medium': say in a message how long to answer"
    ),
    "web_search_options": never("is not supported: this server does not search the web"),
    "return_prompt_text": never("is not supported: ask /tokenize with the same messages, then /detokenize"),
}

RESPONSES: Mapping[str, Neutral] = {
    **{name: rule for name, rule in GENERATION.items() if name not in ("user", "metadata")},
    "background": never("is not supported: the answer comes with the request that asked for it"),
    "background_options": never("is not supported: there are no background requests"),
    "access_programs": OBJECT,
    "context_management": never("is not supported: nothing is left out of a conversation"),
    "conversation": never("is not supported: use previous_response_id"),
    "image": never(_TEXT_ONLY),
    "max_tool_calls": label(int, "a number"),  # of built-in tools, which are not offered
    "prompt": never("is not supported: there are no stored prompts"),
    "enable_response_messages": never("is not supported: messages are not given back"),
    "previous_input_messages": never("is not supported: send the whole input"),
}
"""``user`` and ``metadata`` are given back here, and so are fields of the body."""

MESSAGES: Mapping[str, Neutral] = {
    "cache_control": OBJECT,  # prefixes are always cached
    "metadata": OBJECT,
    "diagnostics": OBJECT,
    "user_profile_id": TEXT,
    "service_tier": only("auto", "standard_only", why="must be auto or standard_only: all are served alike"),
    "speed": only("standard", why="is not supported, but for 'standard'"),
    "context_management": Neutral(
        "is not supported: the history stays as it is",
        lambda value: isinstance(value, dict) and _keeps_all(**value),
    ),
    "container": never("is not supported: there are no containers"),
    "mcp_servers": never("is not supported: the server calls no others"),
    "fallbacks": never("is not supported: there is one model"),
    "inference_geo": never("is not supported: this server is where it is"),
}
"""Of Anthropic's API."""


def _keeps_all(edits: Any = (), **other: Any) -> bool:
    return not other and all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits or ())


TOKENIZE: Mapping[str, Neutral] = {
    name: GENERATION[name] for name in ("user", "media_io_kwargs", "mm_processor_kwargs")
}
