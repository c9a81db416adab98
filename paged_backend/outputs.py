"""What a request gives back. The names are vLLM's, so that code written for it goes on working."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token under the model's raw distribution (before any processor)."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """Its text; parts of characters are U+FFFD."""
    token_bytes: bytes | None = field(default=None, compare=False, repr=False)
    """Where they are other than those of ``decoded_token``."""

    @property
    def utf8(self) -> bytes:
        """The token's own bytes; those of the tokens of a text, joined, are the text."""
        return (self.decoded_token or "").encode() if self.token_bytes is None else self.token_bytes

    @property
    def token(self) -> str:
        """Its text, or ``bytes:\\xe4\\xbd`` where that is only a part of a character."""
        if self.token_bytes is None:
            return self.decoded_token or ""
        try:
            return self.token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that beam search found. score: sum of log-probabilities / length ** length_penalty.

    parents: for each token, which of the num_beams beams of its step it continued.
    """

    token_ids: tuple[int, ...]
    score: float
    parents: tuple[int, ...]
    finished: bool = True


@dataclass(slots=True)
class CompletionOutput:
    """One sampled continuation. ``token_ids``, ``logprobs``, ``text`` and usage are always in step."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """None while running, then ``stop``, ``length``, ``abort`` or ``error``."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end-of-sequence token."""
    beam: Hypothesis | None = None
    """Score and ancestry if it was found by beam search."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def lora_request(self) -> None:
        """Of vLLM's outputs; there are no adapters here."""


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds of ``time.monotonic()``; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """State of a request: everything so far, or only what is new for ``RequestOutputKind.DELTA``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first is None because nothing precedes it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    metrics: RequestMetrics | None = None
    error: Exception | None = None

    @property
    def lora_request(self) -> None:
        """Of vLLM's outputs; there are no adapters here, nor the two prompts of an encoder."""

    encoder_prompt = encoder_prompt_token_ids = kv_transfer_params = lora_request
