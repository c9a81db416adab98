"""What a step costs besides the model: scheduling, building the work, committing the results.

The real EngineCore runs with a runner that answers at once. The prompts are computed first; then every running request
decodes, which is what a loaded engine does nearly all the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


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


def measure_step(running: int, *, waiting: int = 0, steps: int = 200, prompt_tokens: int = 161) -> StepCost:
    """Cost of decode steps with ``running`` requests in the batch and ``waiting`` more at the door.

    The pool holds what the running ones will need and little more, so those that wait are tried at every step and
    refused.
    """
    from paged_backend.cache.manager import CacheManager
    from paged_backend.engine.engine import EngineCore
    from paged_backend.engine.request import Request
    from paged_backend.engine.scheduler import Scheduler
    from paged_backend.runner.base import Result, Runner
    from paged_backend.runner.sampler import Sampled
    from paged_backend.sampling_params import SamplingParams

    if running < 1 or waiting < 0 or steps < 1:
        raise ValueError("a measurement needs running >= 1, waiting >= 0 and steps >= 1")

    class Instant(Runner):
        vocab_size = 32000
        began = ended = 0.0

        def run(self, works: Sequence[Any]) -> list[Any]:
            self.began = time.perf_counter()
            results = [Result([Sampled(7) for _ in work.rows], []) for work in works]
            self.ended = time.perf_counter()
            return results

        def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
            pass

        def give_back(self, blocks: Sequence[int]) -> None:
            pass

    class TimedScheduler(Scheduler):
        ended = 0.0

        def schedule(self) -> list[tuple[Request, int]]:
            picked = super().schedule()
            self.ended = time.perf_counter()
            return picked

    warm_up = 20
    budget = max(
        512, running * prompt_tokens
    )  # all prompts in one step, so that all requests are equally far
    length = prompt_tokens + warm_up + steps + 64
    cache = CacheManager(-(-running * (length + 15) // 16) + 1, 16)
    scheduler = TimedScheduler(cache, max_num_seqs=running + waiting, max_num_batched_tokens=budget)
    runner = Instant()
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
    for _ in range(warm_up):
        core.step()
    costs: list[tuple[float, float, float]] = []
    for _ in range(steps):
        began = time.perf_counter()
        core.step()
        ended = time.perf_counter()
        costs.append((scheduler.ended - began, runner.began - scheduler.ended, ended - runner.ended))
    if len(scheduler.running) != running or len(scheduler.waiting) != waiting:
        raise RuntimeError(f"{len(scheduler.running)} requests ran, {running} were to be measured")
    schedule, build, commit = (median(column) * 1e6 for column in zip(*costs))
    return StepCost(running, waiting, schedule, build, commit)
