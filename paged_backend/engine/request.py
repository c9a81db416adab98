"""Request: one sequence on its way through the engine.

A request with n > 1 becomes n of these after its prompt, one with a beam search num_beams, which share a ``BeamGroup``.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence

from paged_backend.cache.block_table import BlockTable
from paged_backend.constrain.state import GrammarState
from paged_backend.engine.beam_search import BeamGroup
from paged_backend.errors import call_user
from paged_backend.outputs import RequestMetrics
from paged_backend.runner.history import TokenHistory
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
        "constraint",
        "group",
        "history",
        "index",
        "max_tokens",
        "metrics",
        "namespace",
        "num_cached_tokens",
        "num_computed",
        "num_prompt_tokens",
        "num_scored",
        "num_shared",
        "owner",
        "params",
        "priority",
        "request_id",
        "seats",
        "seed",
        "sequence",
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
        group: BeamGroup | None = None,
        owner: Hashable = None,
    ) -> None:
        """params: resolved. max_tokens: what the context leaves of ``params.max_tokens``. stop_ids: ids that end the
        output (end of sequence unless ignored, and the request's own). namespace: tagged parts of the prefix key.
        group: of the beam search that this joins; with None it begins its own if its params ask for one. owner: whom
        it is computed for, the same object for all samples of a request; the id, a mere name, may be used again while
        an earlier request of that name is still being taken out. None takes the id."""
        self.request_id = request_id
        self.owner = request_id if owner is None else owner
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.history = TokenHistory(self.token_ids, self.num_prompt_tokens)
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.bad_words_ids = tuple(tuple(word) for word in bad_words_ids)
        self.constraint: GrammarState | None = None
        self.max_tokens = max_tokens if max_tokens is not None else (params.max_tokens or 1)
        self.namespace = namespace
        self.priority = params.priority
        self.metrics = RequestMetrics(arrival_time)
        self.index = 0
        self.seats = params.n
        self.group = group  # with one, ``index`` is the number of the beam
        if group is None and params.beam_search is not None:
            self.seats = params.beam_search.num_beams
            stops = self.stops if params.stop_criteria else None
            self.group = BeamGroup(params.beam_search, self.max_tokens, self.stop_ids, stops)
        self.arrival = 0
        self.sequence = 0  # a number of its own, given by the scheduler: samples and beams share an arrival
        self.skipped = 0
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
        """Tokens whose KV is still to be computed; 0 only for a beam that waits for the others of its group."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def stops(self, output_token_ids: Sequence[int]) -> bool:
        """Whether one of the request's own criteria ends it after these output tokens."""
        return any(
            call_user(stop, self.history.prompt(), output_token_ids) for stop in self.params.stop_criteria
        )

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller runs earlier and is preempted later. No two sequences have the same."""
        return (self.priority, self.arrival, self.sequence)

    @property
    def reusable_prefix(self) -> int:
        """Tokens that a prefix hit may cover: prompt logprobs need the logits of every position not yet scored."""
        if self.params.prompt_logprobs is None or self.num_scored >= self.num_prompt_tokens:
            return len(self.token_ids)
        return self.num_scored

    def resumed(self, index: int, output_token_ids: Sequence[int]) -> Request:
        """Sample ``index`` as it was when an earlier run had given it this output; it shares nothing but the prompt."""
        other = Request(
            self.request_id,
            self.token_ids[: self.num_prompt_tokens],
            self.params,
            seed=self.params.child_seed(self.seed, index),
            stop_ids=self.stop_ids,
            bad_words_ids=self.bad_words_ids,
            max_tokens=self.max_tokens,
            namespace=self.namespace,
            arrival_time=self.metrics.arrival_time,
            owner=self.owner,
        )
        other.token_ids.extend(output_token_ids)
        other.index, other.seats = index, 1
        if self.constraint is not None:
            other.constraint = self.constraint.fork()
            for token in output_token_ids:
                other.constraint.settle(token)
                other.constraint.advance(token)
        return other

    def twin(self, index: int, table: BlockTable) -> Request:
        """Sample ``index`` of the same prompt, or beam ``index`` of the same group, sharing what is computed so far."""
        other = Request(
            self.request_id,
            self.token_ids[: self.num_prompt_tokens],
            self.params,
            seed=self.params.child_seed(self.seed, index),
            stop_ids=self.stop_ids,
            bad_words_ids=self.bad_words_ids,
            max_tokens=self.max_tokens,
            namespace=self.namespace,
            arrival_time=self.metrics.arrival_time,
            owner=self.owner,
            group=self.group,
        )
        other.token_ids.extend(self.token_ids[self.num_prompt_tokens :])
        other.constraint = self.constraint.fork() if self.constraint is not None else None
        other.index, other.seats, other.arrival, other.priority = index, 1, self.arrival, self.priority
        other.status, other.table = self.status, table
        other.num_computed, other.num_scored = self.num_computed, self.num_prompt_tokens
        other.num_shared = len(table)
        other.num_cached_tokens = self.num_cached_tokens
        other.metrics.first_scheduled_time = self.metrics.first_scheduled_time
        other.metrics.first_token_time = self.metrics.first_token_time
        return other
