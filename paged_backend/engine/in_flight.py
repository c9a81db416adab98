"""InFlightStep: a step that the runner has been given and whose results are not known yet.

A runner that computes while the host goes on can be given the next step before this one is done: scheduling needs to
know that a request will have one more token, not which. ``assume`` makes the requests look as if the step had
succeeded, with stand-ins for the tokens it draws; the step launched behind it names them, and the runner puts in what
was drawn. A request that turns out to have ended has then been computed one token too far, which nobody sees.

This is possible where nothing on the host depends on the tokens (``foreseeable``): no grammar, log-probability, beam or
fork. Otherwise the next step is scheduled when the results are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.request import Request, Status
from paged_backend.engine.step_inputs import scheduled_sequence
from paged_backend.runner.base import Result, ScheduledSequence, drawn_by
from paged_backend.runner.sampler import SampleRow


class InFlightStep:
    """picked: from the scheduler. copies: (source, destination) of blocks, to be made before the step."""

    def __init__(self, picked: Mapping[Request, int], copies: Sequence[tuple[int, int]]) -> None:
        self.requests = list(picked)
        self.scheduled = [scheduled_sequence(request, count) for request, count in picked.items()]
        self.copies = list(copies)
        self.results: Callable[[], list[Result]] = list  # the runner's; raises what went wrong
        self.failed = False
        self._assumed = False

    def foreseeable(self, draws_alone: Callable[[SampleRow], bool]) -> bool:
        """Whether the next step can be scheduled without knowing this one's results. draws_alone: the runner's."""
        return not self.failed and all(
            not sequence.scored_ids and len(sequence.rows) <= 1 and all(map(draws_alone, sequence.rows))
            for sequence in self.scheduled
        )

    def assume(self) -> None:
        """Let the requests look as if all went well. A last token gets no stand-in: there is nothing after it."""
        self._assumed = True
        row = 0
        for request, sequence in zip(self.requests, self.scheduled):
            if request.status is not Status.FINISHED:
                request.num_computed = sequence.end
                if sequence.rows and request.num_output_tokens + 1 < request.max_tokens:
                    request.token_ids.append(drawn_by(row))
            row += len(sequence.rows)

    def settle(self, request: Request, sequence: ScheduledSequence) -> None:
        """This sequence has succeeded: it is computed, and a stand-in makes way for what comes instead."""
        if not self._assumed:
            request.num_computed = sequence.end
        elif sequence.rows:
            del request.token_ids[sequence.end :]

    def withdraw(self, cache: CacheManager) -> None:
        """The step has failed: nothing that was assumed of it holds."""
        if not self._assumed:
            return
        self._assumed = False
        for request, sequence in zip(self.requests, self.scheduled):
            if request.status is Status.FINISHED:
                continue
            if sequence.rows:
                del request.token_ids[sequence.end :]
            if request.status is Status.RUNNING:
                request.num_computed = min(request.num_computed, sequence.start)
            elif request.num_computed > sequence.start:
                # preempted since, and it kept blocks that now hold nothing
                request.num_computed = cache.cut(request.table, 0, sequence.start)


def stands(request: Request, sequence: ScheduledSequence) -> bool:
    """Whether the request is where it was when this was scheduled."""
    return request.status is Status.RUNNING and request.num_computed == sequence.start
