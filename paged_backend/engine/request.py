"""Request: one sequence on its way through the engine. A request with n > 1 becomes n of these after its prompt."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from paged_backend.cache.block_table import BlockTable
from paged_backend.outputs import RequestMetrics
from paged_backend.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """``token_ids`` holds prompt and output; ``num_computed`` of them have their KV in ``table``.

    Everything else follows from these: a prefill chunk, a decode, a prefix hit and a resumption after
    preemption all compute ``token_ids[num_computed:]``.
    """

    __slots__ = (
        "arrival",
        "bad_words_ids",
        "index",
        "max_tokens",
        "metrics",
        "namespace",
        "num_cached_tokens",
        "num_computed",
        "num_prompt_tokens",
        "num_scored",
        "num_shared",
        "overtaken",
        "params",
        "priority",
        "request_id",
        "seats",
        "seed",
        "skipped",
        "status",
        "stop_ids",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        max_tokens: int | None = None,
        namespace: tuple = (),
        arrival_time: float = 0.0,
    ) -> None:
        """params: resolved. max_tokens: what the context leaves of ``params.max_tokens``. stop_ids: ids that end the
        output (end of sequence unless ignored, and the request's own). namespace: tagged parts of the prefix key."""
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.bad_words_ids = tuple(tuple(word) for word in bad_words_ids)
        self.max_tokens = max_tokens if max_tokens is not None else (params.max_tokens or 1)
        self.namespace = namespace
        self.priority = params.priority
        self.metrics = RequestMetrics(arrival_time)
        self.index = 0
        self.seats = params.n
        self.arrival = 0
        self.skipped = 0
        self.overtaken = 0
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_scored = 1  # prompt positions whose logprobs are known; the first has none by definition
        self.num_shared = 0  # leading blocks that another sequence held already when this one took them
        self.num_cached_tokens: int | None = None
        self.table = BlockTable()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; at least 1 while the request lives."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """Smaller runs earlier and is preempted later."""
        return (self.priority, self.arrival)

    @property
    def reusable_prefix(self) -> int:
        """Tokens that a prefix hit may cover: prompt logprobs need the logits of every position not yet scored."""
        if self.params.prompt_logprobs is None or self.num_scored >= self.num_prompt_tokens:
            return len(self.token_ids)
        return self.num_scored

    def twin(self, index: int, table: BlockTable) -> Request:
        """Sample ``index`` of the same prompt, sharing its KV; called when the prompt has just been computed."""
        other = Request(
            self.request_id,
            self.token_ids,
            self.params,
            seed=self.params.child_seed(self.seed, index),
            stop_ids=self.stop_ids,
            bad_words_ids=self.bad_words_ids,
            max_tokens=self.max_tokens,
            namespace=self.namespace,
            arrival_time=self.metrics.arrival_time,
        )
        other.index, other.seats, other.arrival, other.priority = index, 1, self.arrival, self.priority
        other.status, other.table = Status.RUNNING, table
        other.num_computed, other.num_scored = self.num_computed, self.num_prompt_tokens
        other.num_shared = len(table)
        other.num_cached_tokens = self.num_cached_tokens
        other.metrics.first_scheduled_time = self.metrics.first_scheduled_time
        return other
