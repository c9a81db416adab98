"""EngineCore: one synchronous step after another. Threads, text and clients are the business of ``loop``.

A step: schedule -> copy shared tails -> run the model -> append tokens, publish blocks, retire. With a runner that
computes by itself, the next step is scheduled and launched in between (see ``in_flight``), so that it never waits for
the host. What fails, fails alone (see ``step_queue``): KV writes are idempotent, and nothing is published or appended
before a step has succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.beam_search import BeamGroup
from paged_backend.engine.in_flight import InFlightStep, stands
from paged_backend.engine.limits import RequestLimits
from paged_backend.engine.request import Request, Status
from paged_backend.engine.scheduler import Scheduler
from paged_backend.engine.step_queue import StepQueue
from paged_backend.engine.usage import StepUsage, UsageMeter
from paged_backend.errors import RequestFailedError
from paged_backend.outputs import Hypothesis
from paged_backend.runner.base import Result, Runner, ScheduledSequence
from paged_backend.runner.sampler import Sampled

logger = logging.getLogger("paged_backend")


@dataclass(slots=True)
class Update:
    """What one step did for one sequence: a token, an end, or both.

    index: which of the request's outputs it belongs to. beam: given with the last token of a hypothesis.
    """

    request: Request
    index: int
    sampled: Sampled | None = None
    prompt_logprobs: Sequence[Sampled] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: Exception | None = None
    beam: Hypothesis | None = None


class EngineCore:
    """max_model_len: longest prompt + output. always_check: run :meth:`check` after every step (tests do)."""

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        scheduler: Scheduler,
        max_model_len: int,
        always_check: bool = False,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = scheduler
        self.limits = RequestLimits(
            cache,
            runner.vocab_size,
            max_model_len,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
        )
        self.always_check = always_check
        self.usage = UsageMeter(cache.block_size)
        self.num_steps = 0
        self._requests: dict[Hashable, list[Request]] = {}  # by owner
        self._masks: ThreadPoolExecutor | None = None
        self._steps = StepQueue(runner, cache)

    # --- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that is within ``limits``."""
        self._requests.setdefault(request.owner, []).append(request)
        self.scheduler.add(request)

    def finish(self, owner: Hashable, index: int | None = None) -> list[Request]:
        """Take out what is computed for ``owner``, or one of its n samples, in whatever state; its blocks are free at
        once."""
        ended = []
        for request in list(self._requests.get(owner, ())):
            if index is None or (request.index == index and request.seats == 1 and request.group is None):
                self._retire(request, natural=index is not None)
                ended.append(request)
        return ended

    @property
    def num_failed_steps(self) -> int:
        """Steps that had to be run again, request by request."""
        return self._steps.num_failed

    @property
    def has_work(self) -> bool:
        return self._steps.waiting is not None or self.scheduler.has_work

    # --- one step ------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Finish one step and return what it did, in batch order. Empty if there was nothing to do.

        Raises DeviceLostError, and what is a fault of the bookkeeping itself.
        """
        if self._steps.waiting is None:
            self._launch()
        in_flight = self._steps.take()
        if in_flight is None:
            return self._end_stall() if self.scheduler.has_work else []
        if self._steps.can_go_on(in_flight):
            in_flight.assume()
            self._launch()
        updates = self._land(in_flight)
        self.usage.add(self._usage())
        if self.always_check:
            self.check()
        return updates

    def _launch(self) -> None:
        """Schedule a step and give it to the runner, if there is anything to do."""
        picked = self.scheduler.schedule()
        if not picked:
            return
        now = time.monotonic()
        for request in self.scheduler.stats.last_admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        in_flight = InFlightStep(picked, self.cache.take_copies())
        self._prepare_masks(picked)
        self._steps.launch(in_flight)

    def _land(self, in_flight: InFlightStep) -> list[Update]:
        """Wait for a step and take up its results."""
        results = self._steps.results(in_flight)
        self.num_steps += 1
        now = time.monotonic()
        updates: list[Update] = []
        complete: list[Request] = []  # beams that were the last of their group to make a proposal
        for request, sequence, result in zip(in_flight.requests, in_flight.scheduled, results):
            if request.status is Status.FINISHED or result is None:
                continue  # aborted, ended by the step before, or another beam of its group has failed in this one
            if isinstance(result, Exception):
                updates.extend(self._fail(request, result))
            else:
                in_flight.settle(request, sequence)
                self._advance(request, sequence, result, now, updates, complete)
        for request in complete:
            if request.group is not None and request.status is not Status.FINISHED:
                self._branch(request, request.group, now, updates)
        return updates

    def _prepare_masks(self, picked: Mapping[Request, int]) -> None:
        """Let grammars fill their masks in a thread of their own while the model computes."""
        for request, count in picked.items():
            if request.constraint is not None and count == request.num_pending:
                if self._masks is None:
                    self._masks = ThreadPoolExecutor(1, "paged_backend-masks")
                request.constraint.prepare(self._masks)

    def _advance(
        self,
        request: Request,
        sequence: ScheduledSequence,
        result: Result,
        now: float,
        updates: list[Update],
        complete: list[Request],
    ) -> None:
        if sequence.scored_ids:
            first = sequence.start + sequence.logit_rows[0] + 1
            request.num_scored = max(request.num_scored, first + len(sequence.scored_ids))
        # less than the sequence's end where the step behind this one took blocks away
        self.cache.commit(request.table, request.token_ids, min(sequence.end, request.num_computed))
        if not result.sampled:
            if sequence.scored_ids:
                updates.append(Update(request, request.index, prompt_logprobs=result.prompt_logprobs))
            return
        if request.group is not None:
            if self._propose(request, result.sampled[0], updates):
                complete.append(request)
            return
        members = [request]
        for i in range(1, request.seats):
            members.append(self.scheduler.fork(request, i))
        self._requests[request.owner].extend(members[1:])
        for member, sampled in zip(members, result.sampled):
            if isinstance(sampled, Exception):
                updates.extend(self._fail(member, sampled))
                continue
            update = Update(
                member, member.index, sampled, result.prompt_logprobs if member is request else ()
            )
            try:
                self._append(member, sampled.token_id, now, update)
            except Exception as error:  # from its grammar or one of its stop criteria
                update = self._fail(member, error)[0]
            updates.append(update)

    def _append(self, request: Request, token: int, now: float, update: Update) -> None:
        request.token_ids.append(token)
        metrics = request.metrics
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        constraint = request.constraint
        if constraint is not None:
            constraint.advance(token)
        if token in request.stop_ids and request.num_output_tokens >= request.params.min_tokens:
            update.finish_reason = "stop"
            update.stop_reason = token if token in (request.params.stop_token_ids or ()) else None
        elif constraint is not None and constraint.ended:
            update.finish_reason = "stop"
        elif request.num_output_tokens >= request.max_tokens:
            update.finish_reason = "length"
        if request.params.stop_criteria and request.stops(request.output_token_ids):
            update.finish_reason = "stop"
        if update.finish_reason is not None:
            metrics.finished_time = now
            self._retire(request, natural=True)

    def _fail(self, request: Request, cause: Exception) -> list[Update]:
        error = RequestFailedError(f"request {request.request_id} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        if request.group is None:
            self._retire(request)
            return [Update(request, request.index, finish_reason="error", error=error)]
        for member in list(self._requests.get(request.owner, ())):
            self._retire(member)
        return [Update(request, i, finish_reason="error", error=error) for i in range(request.params.n)]

    # --- beam search ---------------------------------------------------------------------------------------------

    def _propose(self, request: Request, sampled: Sampled | Exception, updates: list[Update]) -> bool:
        """Take a beam's continuations; True if it was the last of its group to give them."""
        if isinstance(sampled, Exception):
            updates.extend(self._fail(request, sampled))
        elif request.group is not None:
            return request.group.propose(request.index, sampled.top or ())
        return False

    def _branch(self, request: Request, group: BeamGroup, now: float, updates: list[Update]) -> None:
        """Move a group on. Comes after the step, when all that was computed of its beams is accounted for."""
        try:
            picks = group.advance()
        except Exception as error:  # from a stop criterion
            updates.extend(self._fail(request, error))
            return
        beams = sorted(self._requests[request.owner], key=lambda beam: beam.index)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        if group.done:
            request.metrics.last_token_time = request.metrics.finished_time = now
            for i, found in enumerate(group.best(request.params.n)):
                updates.extend(_told(request, i, found))
            for beam in beams:
                self._retire(beam, natural=beam is request)
            return
        children: list[Request] = []
        taken: set[int] = set()
        for number, pick in enumerate(
            picks
        ):  # every fork comes before any append: it takes over the beam's tokens
            parent = beams[pick.parent]
            child = parent if pick.parent not in taken else self.scheduler.fork(parent, number)
            taken.add(pick.parent)
            children.append(child)
        self._requests[request.owner] = children
        for number, (child, pick) in enumerate(zip(children, picks)):
            child.index, child.seats = number, 1
            child.token_ids.append(pick.token_id)
        for number, beam in enumerate(beams):
            if number not in taken:
                self.scheduler.finish(beam)

    def _retire(self, request: Request, natural: bool = False) -> None:
        self.scheduler.finish(request, natural)
        group = self._requests.get(request.owner, [])
        if request in group:
            group.remove(request)
            if not group:
                del self._requests[request.owner]

    # --- looking after itself ------------------------------------------------------------------------------------

    def fail_all(self, cause: Exception) -> list[Update]:
        """Give every request the error ``cause``; the last resort when bookkeeping itself raised."""
        updates = []
        self._steps.waiting = None
        for request in self.scheduler.requests():
            updates.extend(self._fail(request, cause))
        return updates

    def _end_stall(self) -> list[Update]:
        """Nothing is in flight and nothing could be scheduled: give up the youngest, so that the others get its blocks.

        The scheduler's order rules this out; should it happen, it must be loud and not a wait for ever.
        """
        requests = self.scheduler.requests()
        youngest = max(requests, key=lambda request: request.order)
        state = [
            (r.request_id, r.index, r.order, r.status.value, len(r.table), r.num_pending)
            for r in requests[:50]
        ]
        logger.error(
            "nothing can be scheduled, of %d blocks %d are free; request %s is given up. The first of %d requests, as "
            "(id, index, order, status, blocks, tokens to compute): %s",
            self.cache.pool.capacity,
            self.cache.pool.num_free,
            youngest.request_id,
            len(requests),
            state,
        )
        return self._fail(youngest, RuntimeError("the scheduler found no way to go on"))

    def check(self) -> None:
        """Raise if a cache invariant is broken or a block leaked."""
        self.cache.check([request.table for request in self.scheduler.requests()])

    def trim(self, least: int | None = None) -> int:
        """Drop cached prefixes that no request uses, all or the coldest, and give back the memory of whatever holds
        nothing; returns the number of blocks given back.

        least: blocks that are to be given back if so many are unused; None: all.
        """
        pool = self.cache.pool
        before = pool.num_committed
        pool.drop_cached(least)
        if self.runner.give_back(pool.empty()):  # all of them, for the pages that neighbours share
            pool.uncommit()
        return before - pool.num_committed

    def reset_prefixes(self) -> None:
        """Forget all cached prefixes, those in use included. What runs goes on and publishes nothing of it."""
        self.cache.reset_prefixes()
        for request in self.scheduler.waiting:
            if not len(request.table):
                self.cache.free(request.table)
                prompt = request.token_ids[: request.num_prompt_tokens]  # behind it may be a stand-in
                request.table = self.cache.open(prompt, request.namespace, owner=request)

    def release(self) -> None:
        """Let go of the model and its KV memory; the core is of no use afterwards."""
        self._steps.close()
        del self.runner
        if self._masks is not None:
            self._masks.shutdown()

    def _usage(self) -> StepUsage:
        requests = self.scheduler.holders()
        blocks = self.cache.pool.num_used
        size = self.cache.block_size
        ahead = self._steps.waiting
        written = 0  # by the step in flight
        if ahead is not None:
            pairs = zip(ahead.requests, ahead.scheduled)
            written = sum(len(sequence.token_ids) for request, sequence in pairs if stands(request, sequence))
        unused = sum(len(r.table) * size - r.num_computed for r in requests) - written
        logical = sum(r.num_computed for r in requests) + written
        return StepUsage(blocks, blocks * size - unused, logical, len(self.scheduler.running))


def _told(request: Request, index: int, found: Hypothesis) -> list[Update]:
    """A finished hypothesis as the updates that its tokens would have made."""
    updates = [Update(request, index, Sampled(token)) for token in found.token_ids]
    last = updates[-1]
    ended = found.token_ids[-1] in request.stop_ids or len(found.token_ids) < request.max_tokens
    last.finish_reason, last.beam = "stop" if ended else "length", found
    if found.token_ids[-1] in (request.params.stop_token_ids or ()):
        last.stop_reason = found.token_ids[-1]
    return updates
