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
from dataclasses import dataclass

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.request import Request, Status
from paged_backend.engine.step_inputs import scored_positions, work_of
from paged_backend.runner.base import Result, Work, drawn_by
from paged_backend.runner.sampler import SampleRow


@dataclass(slots=True)
class Part:
    """One request's part: ``count`` tokens from ``start`` on, of ``known`` ones; scored: see ``scored_positions``."""

    request: Request
    count: int
    start: int
    known: int
    scored: tuple[int, int]

    @property
    def end(self) -> int:
        """Tokens computed when the step has succeeded."""
        return self.start + self.count

    @property
    def stands(self) -> bool:
        """Whether the request is where it was when this was scheduled."""
        return self.request.status is Status.RUNNING and self.request.num_computed == self.start


class InFlightStep:
    """picked: from the scheduler. copies: (source, destination) of blocks, to be made before the step."""

    def __init__(self, picked: Mapping[Request, int], copies: Sequence[tuple[int, int]]) -> None:
        self.parts = [
            Part(
                request, count, request.num_computed, len(request.token_ids), scored_positions(request, count)
            )
            for request, count in picked.items()
        ]
        self.works: list[Work] = [work_of(request, count) for request, count in picked.items()]
        self.copies = list(copies)
        self.results: Callable[[], list[Result]] = list  # the runner's; raises what went wrong
        self.failed = False
        self._assumed = False

    def foreseeable(self, draws_alone: Callable[[SampleRow], bool]) -> bool:
        """Whether the next step can be scheduled without knowing this one's results. draws_alone: the runner's."""
        return not self.failed and all(
            not work.scored_ids and len(work.rows) <= 1 and all(map(draws_alone, work.rows))
            for work in self.works
        )

    def assume(self) -> None:
        """Let the requests look as if all went well. A last token gets no stand-in: there is nothing after it."""
        self._assumed = True
        row = 0
        for part, work in zip(self.parts, self.works):
            request = part.request
            if request.status is not Status.FINISHED:
                request.num_computed = part.end
                if work.rows and request.num_output_tokens + 1 < request.max_tokens:
                    request.token_ids.append(drawn_by(row))
            row += len(work.rows)

    def settle(self, part: Part) -> None:
        """A part has succeeded: its tokens are computed, and stand-ins make way for what comes instead."""
        if self._assumed:
            del part.request.token_ids[part.known :]
        else:
            part.request.num_computed = part.end

    def withdraw(self, cache: CacheManager) -> None:
        """The step has failed: nothing that was assumed of it holds."""
        if not self._assumed:
            return
        self._assumed = False
        for part in self.parts:
            request = part.request
            if request.status is Status.FINISHED:
                continue
            del request.token_ids[part.known :]
            if request.status is Status.RUNNING:
                request.num_computed = min(request.num_computed, part.start)
            elif (
                request.num_computed > part.start
            ):  # preempted since, and it kept blocks that now hold nothing
                request.num_computed = cache.cut(request.table, 0, part.start)
