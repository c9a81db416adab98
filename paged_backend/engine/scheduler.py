"""Scheduler: which tokens each step computes, under one budget and one pool of blocks.

A step takes running decodes first, then running prefill chunks, then new requests, always oldest first, where
"older" is smaller (priority, arrival). There are no phases: each request's computed tokens chase its known tokens.
Chunks deep in a long prompt are smaller, as their attention costs more (see ``chunking``).

A request is admitted if the pool can hold what it and the running ones are expected to grow to (see ``admission``);
when that guess fails, preemption covers it.

Preemption takes tail blocks, only as many as are needed, from the youngest that holds any; the rest of the victim
stays. A request never takes from an older one, so the oldest always runs to its end: this is the proof of progress.

A waiting request that does not fit may be passed by smaller ones, but at most ``max_skips`` times; then nothing
behind it is admitted before it. A request that higher priorities keep overtaking is promoted after ``max_overtakes``.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.admission import FuturePeak, OutputLengths
from paged_backend.engine.chunking import NO_CONTEXT_COST, ChunkCost
from paged_backend.engine.request import Request, Status

LOOK_AHEAD = 8
"""How many requests that do not fit are looked past in one step."""

PROMOTED = -(1 << 62)
"""The priority of a request that was overtaken too often."""


@dataclass(slots=True)
class SchedulerStats:
    num_preemptions: int = 0
    scheduled_tokens: int = 0
    admitted: int = 0
    last_admitted: list[Request] = field(default_factory=list)


class Scheduler:
    """Owns the waiting and running requests; all methods are called by the engine's own thread."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        max_skips: int = 32,
        max_overtakes: int = 256,
        chunk_cost: ChunkCost = NO_CONTEXT_COST,
    ) -> None:
        self.cache = cache
        self.chunk_cost = chunk_cost
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_skips = max_skips
        self.max_overtakes = max_overtakes
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.lengths = OutputLengths()
        self.stats = SchedulerStats()
        self._arrivals = 0
        self._preempted_now = False
        self._mixed_priorities = False

    # --- coming and going ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool and the seats (the engine refuses the others at the door)."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.table = self.cache.open(request.token_ids, request.namespace, owner=request)
        if self.waiting and request.priority != self.waiting[-1].priority:
            self._mixed_priorities = True
        insort(self.waiting, request, key=_order)

    def fork(self, request: Request, index: int) -> Request:
        """A request that shares all KV of ``request`` so far, sample or beam ``index``; it takes one of its seats.

        A beam may have been preempted; the fork then waits like it.
        """
        twin = request.twin(index, self.cache.fork(request.table))
        insort(self.running if twin.status is Status.RUNNING else self.waiting, twin, key=_order)
        request.seats -= 1
        return twin

    def finish(self, request: Request, natural: bool = False) -> None:
        """Take a request out, in whatever state, and free its blocks. natural: its length is worth learning from."""
        if request.status is Status.FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self.cache.free(request.table)
        if natural:
            self.lengths.add(request.num_output_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def requests(self) -> list[Request]:
        return self.running + self.waiting

    # --- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> list[tuple[Request, int]]:
        """(request, number of its next tokens to compute) for this step; their blocks are reserved. Empty if idle."""
        picked: dict[Request, int] = {}
        budget = self.max_num_batched_tokens
        self._preempted_now = False
        self.stats.last_admitted.clear()
        decodes = [r for r in self.running if r.num_pending == 1]
        prefills = [r for r in self.running if r.num_pending > 1]
        for request in decodes + prefills:
            if budget <= 0:
                break
            count = self.chunk_cost.chunk(request.num_pending, request.num_computed, budget)
            if request.status is not Status.RUNNING:
                continue  # an older request has just taken its blocks
            freed = self._make_room(request, request.num_computed + count, picked)
            if freed is not None:  # else it stalls, keeping its blocks, until an older request has finished
                picked[request] = count
                cost = 1 if count == 1 else self.chunk_cost.cost(count, request.num_computed)
                budget += freed - cost
        if self.waiting and budget > 0 and not self._preempted_now:
            self._admit(picked, budget)
        if not picked and self.waiting:
            # everything that runs stalls on blocks which an older, preempted request still holds: that one goes first
            self._resume_oldest(picked, budget)
        self.stats.scheduled_tokens += sum(picked.values())
        return list(picked.items())

    def _make_room(self, request: Request, num_tokens: int, picked: dict[Request, int]) -> int | None:
        """Reserve blocks up to ``num_tokens``, preempting younger requests if need be.

        Returns the step's tokens that victims gave back, or None if there is no room and nobody younger to take from.
        """
        refund = 0
        while not self.cache.reserve(request.table, request.num_computed, num_tokens):
            victim = self._youngest_holder(request)
            if victim is None:
                return None
            short = (
                self.cache.missing(request.table, request.num_computed, num_tokens) - self.cache.pool.num_free
            )
            refund += picked.pop(victim, 0)
            self._preempt(victim, short)
        return refund

    def _youngest_holder(self, request: Request) -> Request | None:
        for queue in (self.waiting, self.running):  # what waits is not computing: take from it first
            for other in reversed(queue):
                if other.order <= request.order:
                    break
                if len(other.table):
                    return other
        return None

    def _preempt(self, victim: Request, want_free: int) -> None:
        victim.num_computed = self.cache.cut(victim.table, want_free, victim.num_computed)
        victim.num_shared = min(victim.num_shared, len(victim.table))
        if victim.status is Status.RUNNING:
            self.running.remove(victim)
            victim.status = Status.PREEMPTED
            victim.metrics.num_preemptions += 1
            self.stats.num_preemptions += 1
            self._preempted_now = True
            insort(self.waiting, victim, key=_order)

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self, picked: dict[Request, int], budget: int) -> None:
        seats = self.max_num_seqs - sum(r.seats for r in self.running)
        blocked: list[Request] = []
        peak: FuturePeak | None = None
        for request in list(self.waiting):
            if budget <= 0 or seats <= 0 or len(blocked) > LOOK_AHEAD:
                break
            hits = self.cache.match(request.table, request.reusable_prefix)
            leader = self.cache.leader(request.table, len(hits), request.reusable_prefix)
            if isinstance(leader, Request) and leader.order < request.order:
                continue  # its next block is being computed right now: it will be a hit in a moment
            fits = request.seats <= seats
            if fits and self.running:
                if peak is None:
                    peak = FuturePeak(self.cache, self.lengths, self.running)
                fits = peak.with_candidate(request, hits) <= self.cache.pool.capacity
            count = self._start(request, hits, budget) if fits else 0
            if count == 0:
                if request.skipped >= self.max_skips:
                    break  # it has been passed often enough: nothing behind it before it
                blocked.append(request)
                continue
            for passed in blocked:
                passed.skipped += 1
            self._overtake(request)
            peak = None
            picked[request] = count
            budget -= self.chunk_cost.cost(count, request.num_computed)
            seats -= request.seats

    def _resume_oldest(self, picked: dict[Request, int], budget: int) -> None:
        request = self.waiting[0]
        while self._youngest_holder(request) is not None and not picked:
            count = self._start(request, [], budget)
            if count:
                picked[request] = count
                return
            victim = self._youngest_holder(request)
            if victim is not None:
                self._preempt(victim, self.cache.pool.capacity)

    def _start(self, request: Request, hits: list[int], budget: int) -> int:
        """Move a waiting request to running, with ``hits`` adopted and blocks for its first tokens reserved.

        Returns how many tokens it computes in this step; 0 if the blocks are not there, and nothing has changed
        but that younger waiting requests may have lost some they held.
        """
        cache = self.cache
        computed = (len(request.table) + len(hits)) * cache.block_size
        count = self.chunk_cost.chunk(len(request.token_ids) - computed, computed, budget)
        revived = sum(1 for b in hits if b and cache.pool.is_free(b))
        need = cache.blocks_for(computed + count) - len(request.table) - len(hits) + revived
        while need > cache.pool.num_free:
            victim = self._youngest_holder(request)
            if victim is None or victim.status is Status.RUNNING:
                return 0
            self._preempt(victim, need - cache.pool.num_free)
        request.num_shared = len(request.table) + len(hits) - revived if hits else request.num_shared
        cache.adopt(request.table, hits)
        request.num_computed = computed
        cache.reserve(request.table, computed, computed + count)
        cache.lead(request.table)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(
                computed, request.num_prompt_tokens
            )  # a resumed output may hit as well
            cache.prefix_queries += request.num_prompt_tokens
            cache.prefix_hits += request.num_cached_tokens
        self.waiting.remove(request)
        request.status = Status.RUNNING
        request.skipped = 0
        insort(self.running, request, key=_order)
        self.stats.admitted += 1
        self.stats.last_admitted.append(request)
        return count

    def _overtake(self, request: Request) -> None:
        if not self._mixed_priorities:
            return
        for other in self.waiting:
            if other.arrival < request.arrival and other.priority > request.priority:
                other.overtaken += 1
                if other.overtaken >= self.max_overtakes:
                    other.priority = PROMOTED
        self.waiting.sort(key=_order)
        self._mixed_priorities = len({r.priority for r in self.waiting}) > 1


def _order(request: Request) -> tuple[int, int]:
    return request.order
