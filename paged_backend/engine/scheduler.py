"""Scheduler: which tokens each step computes, under one budget and one pool of blocks.

A step takes running decodes first, then running prefill chunks, then new requests, always oldest first, where
"older" is smaller (priority, arrival, sequence): a total order, in which the samples and beams of one request follow
each other. There are no phases: each request's computed tokens chase its known tokens. Chunks deep in a long prompt
are smaller, as their attention costs more (see ``chunking``).

A request is admitted if the pool can hold what it and the running ones are expected to grow to (see ``admission``);
when that guess fails, preemption covers it.

Preemption takes tail blocks, only as many as are needed, from the youngest that holds any; the rest of the victim
stays. A request never takes from an older one, and takes from all that are younger, so the oldest that has anything to
compute always runs to its end: this is the proof of progress.

A waiting request that does not fit may be passed by smaller ones, but at most ``max_skips`` times; then nothing
behind it is admitted before it. A request that higher priorities keep overtaking is promoted after ``max_overtakes``
(see ``waiting_queue``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.admission import FuturePeak, OutputLengths
from paged_backend.engine.chunking import NO_CONTEXT_COST, ChunkCost
from paged_backend.engine.request import Request, Status
from paged_backend.engine.waiting_queue import PROMOTED, WaitingQueue, insert, remove

LOOK_AHEAD = 8
"""How many requests that do not fit are looked past in one step."""

FOLLOWERS = 64
"""How many requests that wait for a block which another one computes are looked past in one step."""


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
        self.running: list[Request] = []
        self.waiting = WaitingQueue(max_overtakes)
        self.lengths = OutputLengths()
        self.stats = SchedulerStats()
        self._arrivals = itertools.count(1)
        self._sequences = itertools.count(1)
        # of the step that is being scheduled
        self._picked: dict[Request, int] = {}
        self._costs: dict[Request, int] = {}
        self._budget = 0
        self._has_preempted = False

    # --- coming and going ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool and the seats (the others are refused before, see ``limits``)."""
        request.arrival, request.sequence = next(self._arrivals), next(self._sequences)
        request.table = self.cache.open(request.token_ids, request.namespace, owner=request)
        self.waiting.add(request)

    def fork(self, request: Request, index: int) -> Request:
        """A request that shares all KV of ``request`` so far, sample or beam ``index``; it takes one of its seats.

        A beam may have been preempted; the fork then waits like it.
        """
        twin = request.twin(index, self.cache.fork(request.table))
        twin.sequence = next(self._sequences)
        if twin.status is Status.RUNNING:
            insert(self.running, twin)
        else:
            self.waiting.add(twin)
        request.seats -= 1
        return twin

    def finish(self, request: Request, natural: bool = False) -> None:
        """Take a request out, in whatever state, and free its blocks. natural: its length is worth learning from."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            remove(self.running, request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self.cache.free(request.table)
        if natural:
            self.lengths.add(request.num_output_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def holders(self) -> list[Request]:
        """All that hold blocks."""
        return self.running + self.waiting.holders

    # --- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> dict[Request, int]:
        """{request: how many of its next tokens to compute} in this step, in the order of the batch.

        Their blocks are reserved. Empty if there is nothing to do before the step in flight has landed.
        """
        picked = self._picked = {}
        self._costs = {}
        self._budget = self.max_num_batched_tokens
        self._has_preempted = False
        self.stats.last_admitted.clear()
        decodes = [r for r in self.running if r.num_pending == 1]
        prefills = [r for r in self.running if r.num_pending > 1]
        for request in decodes + prefills:
            if self._budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue  # an older request has just taken its blocks
            count = self.chunk_cost.chunk(request.num_pending, request.num_computed, self._budget)
            if self._make_room(request, request.num_computed + count):
                self._pick(request, count)
            # else it stalls, keeping its blocks, until an older request has finished
        if self.waiting and not self._has_preempted:
            self._admit()
        if not picked and self.waiting:
            # everything that runs stalls on blocks which an older, preempted request still holds: that one goes first
            self._resume_oldest()
        self.stats.scheduled_tokens += sum(picked.values())
        return picked

    def _pick(self, request: Request, count: int) -> None:
        cost = 1 if count == 1 else self.chunk_cost.cost(count, request.num_computed)
        self._picked[request], self._costs[request] = count, cost
        self._budget -= cost

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks up to ``num_tokens``, preempting younger requests if need be.

        False if there is no room and nobody younger to take from.
        """
        while not self.cache.reserve(request.table, request.num_computed, num_tokens):
            victim = self._youngest_holder(request)
            if victim is None:
                return False
            missing = self.cache.missing(request.table, request.num_computed, num_tokens)
            self._preempt(victim, missing - self.cache.pool.num_free)
        return True

    def _youngest_holder(self, request: Request) -> Request | None:
        """Of those younger than ``request``, the one to take blocks from."""
        # what waits is not computing: take from it first
        for holders in (self.waiting.holders, self.running):
            if holders and holders[-1].order > request.order:
                return holders[-1]
        return None

    def _preempt(self, victim: Request, want_free: int) -> None:
        """Take tail blocks from ``victim``; what it was to compute in this step goes back to the budget."""
        victim.num_computed = self.cache.cut(victim.table, want_free, victim.num_computed)
        victim.num_shared = min(victim.num_shared, len(victim.table))
        if victim.status is not Status.RUNNING:
            self.waiting.note_blocks(victim)
            return
        if self._picked.pop(victim, 0):
            self._budget += self._costs.pop(victim)
        remove(self.running, victim)
        victim.status = Status.PREEMPTED
        victim.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._has_preempted = True
        self.waiting.add(victim)

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        seats = self._free_seats()
        blocked: list[Request] = []
        peak: FuturePeak | None = None
        passed = 0  # so many wait on, the next one is tried now
        while self._budget > 0 and seats > 0 and len(blocked) <= LOOK_AHEAD and passed < len(self.waiting):
            request = self.waiting[passed]
            hits = self._hits(request)
            leader = self.cache.leader(request.table, len(hits), request.reusable_prefix)
            if isinstance(leader, Request) and leader.order < request.order:
                # its next block is being computed right now: it will be a hit in a moment
                passed += 1
                if passed - len(blocked) > FOLLOWERS:
                    break
                continue
            fits = request.seats <= seats
            if fits and self.running:
                if peak is None:
                    peak = FuturePeak(self.cache, self.lengths, self.running)
                fits = peak.with_candidate(request, hits) <= self.cache.pool.capacity
            if not (fits and self._start(request, hits)):
                if request.skipped >= self.max_skips:
                    break  # it has been passed often enough: nothing behind it before it
                blocked.append(request)
                passed += 1
                continue
            for other in blocked:
                other.skipped += 1
            peak = None
            seats -= request.seats
        for request in self.stats.last_admitted:
            overtaken = self.waiting.overtaken_by(request)
            if overtaken is not None:
                self._promote(overtaken)

    def _hits(self, request: Request) -> list[int]:
        """Blocks that go on where ``request`` has its last one, with what it would otherwise compute."""
        hits = self.cache.match(request.table, request.reusable_prefix)
        if request.group is not None:
            # the pool has room for a group whose beams share their prompt, whether or not it is in the prefix cache
            full = min(request.num_prompt_tokens, request.reusable_prefix - 1) // self.cache.block_size
            for beam in self.holders():
                if beam.group is request.group and beam.table.num_holes == 0:
                    end = min(full, beam.num_computed // self.cache.block_size)
                    hits = max(hits, list(beam.table.block_ids[len(request.table) : end]), key=len)
        return hits

    def _free_seats(self) -> int:
        return self.max_num_seqs - sum(r.seats for r in self.running)

    def _resume_oldest(self) -> None:
        """Start the first request that waits, whatever those that are younger than it lose by that."""
        request = self.waiting[0]
        while not (request.seats <= self._free_seats() and self._start(request, self._hits(request))):
            victim = self._youngest_holder(request)
            if victim is None:
                return
            self._preempt(victim, self.cache.pool.capacity)

    def _start(self, request: Request, hits: list[int]) -> bool:
        """Move a waiting request to running, with ``hits`` adopted and blocks for its first tokens reserved.

        False if the blocks are not there; then nothing has changed but that younger waiting requests may have lost
        some they held.
        """
        cache = self.cache
        computed = (len(request.table) + len(hits)) * cache.block_size
        count = self.chunk_cost.chunk(len(request.token_ids) - computed, computed, self._budget)
        fresh = cache.blocks_for(computed + count) - len(request.table) - len(hits)
        while True:
            revived = sum(
                1 for b in hits if b and cache.pool.is_free(b)
            )  # more when a victim held some of them
            need = fresh + revived
            if need <= cache.pool.num_free:
                break
            victim = self._youngest_holder(request)
            if victim is None or victim.status is Status.RUNNING:
                return False
            self._preempt(victim, need - cache.pool.num_free)
        self.waiting.remove(request)
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
        request.status = Status.RUNNING
        request.skipped = 0
        insert(self.running, request)
        self.stats.admitted += 1
        self.stats.last_admitted.append(request)
        self._pick(request, count)
        return True

    def _promote(self, request: Request) -> None:
        """Before everybody else, with all of its samples or beams, which stay side by side in the order."""
        for other in list(self.running):
            if other.arrival == request.arrival and other is not request:
                remove(self.running, other)
                other.priority = PROMOTED
                insert(self.running, other)
        self.waiting.promote(request)
