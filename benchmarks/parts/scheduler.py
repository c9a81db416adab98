"""What a step costs besides the model: scheduling, building the work, committing the results.

The real EngineCore runs with a runner that answers at once. The prompts are computed first; then every running request
decodes, which is what a loaded engine does nearly all the time. With a runner that takes its time, as a device does,
the same loop shows how much of that cost is left when the next step is launched before this one is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from paged_backend.runner.base import Result, Runner

if TYPE_CHECKING:
    from paged_backend.engine.core import EngineCore

_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median microseconds of one step. waiting: requests that wait because the pool is full."""

    running: int
    waiting: int
    schedule: float
    build: float
    commit: float

    @property
    def total(self) -> float:
        return self.schedule + self.build + self.commit


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median microseconds from the end of one step to the end of the next, on a device that computes for ``device``.

    in_turn: each step is launched when the one before has landed; ahead: before that.
    """

    running: int
    device: float
    in_turn: float
    ahead: float


class Instant(Runner):
    """Answers at once."""

    vocab_size = 32000
    began = ended = 0.0

    def run(self, works: Sequence[Any]) -> list[Any]:
        self.began = time.perf_counter()
        results = _sevens(works)
        self.ended = time.perf_counter()
        return results

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def give_back(self, blocks: Sequence[int]) -> bool:
        return False


class Busy(Instant):
    """A device that is busy for ``seconds`` with each step, one after another, while the host goes on."""

    def __init__(self, seconds: float, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self._seconds = seconds
        self._free_at = 0.0

    def run(self, works: Sequence[Any]) -> list[Any]:
        return self.launch(works)()

    def draws_alone(self, row: Any) -> bool:
        from paged_backend.runner.sampler import only_truncates

        return only_truncates(row)

    def launch(self, works: Sequence[Any]) -> Callable[[], list[Any]]:
        ends = self._free_at = max(time.perf_counter(), self._free_at) + self._seconds

        def results() -> list[Any]:
            left = ends - time.perf_counter()
            if left > 0:
                threading.Event().wait(left)
            return _sevens(works)

        return results


def measure_step(running: int, *, waiting: int = 0, steps: int = 200, prompt_tokens: int = 161) -> StepCost:
    """Cost of decode steps with ``running`` requests in the batch and ``waiting`` more that wait.

    The pool holds what the running ones will need and little more, so those that wait are tried at every step and
    refused.
    """
    runner = Instant()
    core = _decoding(runner, running, waiting, steps, prompt_tokens)
    scheduler: Any = core.scheduler
    schedule, scheduled = scheduler.schedule, [0.0]

    def timed() -> Any:
        picked = schedule()
        scheduled[0] = time.perf_counter()
        return picked

    scheduler.schedule = timed
    costs: list[tuple[float, float, float]] = []
    for _ in range(steps):
        began = time.perf_counter()
        core.step()
        ended = time.perf_counter()
        costs.append((scheduled[0] - began, runner.began - scheduled[0], ended - runner.ended))
    if len(scheduler.running) != running or len(scheduler.waiting) != waiting:
        raise RuntimeError(f"{len(scheduler.running)} requests ran, {running} were to be measured")
    return StepCost(running, waiting, *(median(column) * 1e6 for column in zip(*costs)))


def measure_overlap(
    running: int, device_ms: float, *, steps: int = 200, prompt_tokens: int = 161
) -> StepTime:
    """How long steps of ``running`` decoding requests last on a device that computes ``device_ms`` for each."""
    if device_ms <= 0:
        raise ValueError("a device needs more than 0 ms for a step")
    found: list[float] = []
    for runs_ahead in (False, True):
        core = _decoding(Busy(device_ms / 1e3, runs_ahead), running, 0, steps, prompt_tokens)
        ends = [time.perf_counter()]
        for _ in range(steps):
            core.step()
            ends.append(time.perf_counter())
        found.append(median(b - a for a, b in pairwise(ends)) * 1e6)
    return StepTime(running, device_ms * 1e3, *found)


def _decoding(runner: Runner, running: int, waiting: int, steps: int, prompt_tokens: int) -> EngineCore:
    """A core whose ``running`` requests all decode, for ``steps`` steps at least."""
    from paged_backend.cache.manager import CacheManager
    from paged_backend.engine.core import EngineCore
    from paged_backend.engine.request import Request
    from paged_backend.engine.scheduler import Scheduler
    from paged_backend.sampling_params import SamplingParams

    if running < 1 or waiting < 0 or steps < 1:
        raise ValueError("a measurement needs running >= 1, waiting >= 0 and steps >= 1")
    # all prompts in one step, so that all requests are equally far
    budget = max(512, running * prompt_tokens)
    length = prompt_tokens + _WARM_UP + steps + 64
    cache = CacheManager(-(-running * (length + 15) // 16) + 1, 16)
    scheduler = Scheduler(cache, max_num_seqs=running + waiting, max_num_batched_tokens=budget)
    core = EngineCore(runner, cache, scheduler, length + 1)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length - prompt_tokens).resolved()

    def arrive(first: int, last: int, prompt_length: int) -> None:
        for i in range(first, last):
            prompt = [1 + (i * 7919 + j * 31) % 31999 for j in range(prompt_length)]  # no two share a block
            core.add(Request(f"bench-{i}", prompt, params, seed=i))

    arrive(0, running, prompt_tokens)
    while len(scheduler.running) < running or any(r.num_pending > 1 for r in scheduler.running):
        core.step()
    arrive(running, running + waiting, length - 1)  # so long that it can never fit beside the others
    for _ in range(_WARM_UP):
        core.step()
    return core


def _sevens(works: Sequence[Any]) -> list[Any]:
    from paged_backend.runner.sampler import Sampled

    return [Result([Sampled(7) for _ in work.rows], []) for work in works]
