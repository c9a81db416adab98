"""StepQueue: the steps that the runner has, one, or two where the next is launched behind the one that computes.

If a step raises, each of its requests is run again alone, once. A step behind it has been computed on top of it and is
run again in the same way.
"""

from __future__ import annotations

import contextlib
import logging

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.in_flight import InFlightStep, stands
from paged_backend.engine.request import Request
from paged_backend.engine.step_inputs import scheduled_sequence
from paged_backend.errors import DeviceLostError, call_user
from paged_backend.runner.base import Result, Runner, ScheduledSequence

logger = logging.getLogger("paged_backend")


class StepQueue:
    """waiting: a step that was launched and whose results nobody has asked for yet, None if there is none.

    Every method raises DeviceLostError when the runner's device is gone.
    """

    def __init__(self, runner: Runner, cache: CacheManager) -> None:
        self.waiting: InFlightStep | None = None
        self.num_failed = 0
        self._runner = runner
        self._cache = cache

    def launch(self, in_flight: InFlightStep) -> None:
        """Give a step to the runner. What goes wrong is found by :meth:`results`."""
        try:
            if in_flight.copies:
                self._runner.copy_blocks(in_flight.copies)
            in_flight.results = call_user(
                self._runner.launch, in_flight.scheduled
            )  # a module's hooks run there
        except Exception as error:
            self._note_failure(in_flight, error)
        self.waiting = in_flight

    def take(self) -> InFlightStep | None:
        """The step whose turn it is; what is launched from now on is behind it."""
        in_flight, self.waiting = self.waiting, None
        return in_flight

    def can_go_on(self, in_flight: InFlightStep) -> bool:
        """Whether the step after ``in_flight`` may be launched before its results are known."""
        return self._runner.runs_ahead and in_flight.foreseeable(self._runner.draws_alone)

    def results(self, in_flight: InFlightStep) -> list[Result] | list[Result | Exception | None]:
        """Wait for a step: a result for each of its requests.

        Where the step failed each is run alone: an exception for one that fails again, None for one that is to be
        scheduled anew.
        """
        if not in_flight.failed:
            try:
                return call_user(in_flight.results)
            except Exception as error:
                self._note_failure(in_flight, error)
        behind = self.waiting
        if behind is not None and not behind.failed:
            behind.failed = True
            with contextlib.suppress(Exception):
                call_user(behind.results)
        in_flight.withdraw(self._cache)
        return [
            self._alone(request, sequence, in_flight)
            for request, sequence in zip(in_flight.requests, in_flight.scheduled)
        ]

    def _note_failure(self, in_flight: InFlightStep, error: Exception) -> None:
        if isinstance(error, DeviceLostError):
            raise error
        in_flight.failed = True
        self.num_failed += 1
        logger.warning(
            "a step of %d requests failed (%r); running each alone", len(in_flight.requests), error
        )

    def _alone(
        self, request: Request, sequence: ScheduledSequence, in_flight: InFlightStep
    ) -> Result | Exception | None:
        try:
            mine = [pair for pair in in_flight.copies if pair[1] in request.table.block_ids]
            if mine:
                self._runner.copy_blocks(mine)
            if not stands(request, sequence):
                return None
            return call_user(self._runner.run, [scheduled_sequence(request, len(sequence.token_ids))])[0]
        except DeviceLostError:
            raise
        except Exception as error:
            return error

    def close(self) -> None:
        """Forget what is in flight and let the runner go."""
        self.waiting = None
        self._runner.close()
        del self._runner
