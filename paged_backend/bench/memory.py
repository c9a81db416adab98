"""KV memory under one trace: the engine itself (EngineCore, scheduler, cache) with a runner that follows the trace's
lengths. The scheduler is told only that a request may grow to the context's end, never how long it will be.

After each step every slot of the pool is in one state, as in the paper's figure 2: ``tokens`` hold KV; ``reserved``
will, but not yet; ``internal`` is allocated and never will; ``external`` is free and enough for the request that
waits, but in holes; ``unallocated`` is the rest. Figures are averaged over the loaded part: the steps after which
somebody waits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.bench.traces import TraceRequest
from paged_backend.runner.base import Result, Runner

CATEGORIES = ("tokens", "reserved", "internal", "external", "unallocated")


@dataclass(frozen=True, slots=True)
class Sample:
    """Slots of the pool by state after one step, and the requests that run and wait."""

    tokens: int
    reserved: int
    internal: int
    external: int
    unallocated: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What one allocator did with the trace. computed_tokens: tokens run through the model, recomputation included."""

    name: str
    pool_tokens: int
    samples: Sequence[Sample]
    computed_tokens: int
    preemptions: int = 0

    @property
    def saturated(self) -> bool:
        """Whether anybody ever waited; if not, figures are averaged over every step in which somebody ran."""
        return any(s.waiting for s in self.samples)

    @property
    def loaded(self) -> list[Sample]:
        wanted = [s for s in self.samples if (s.waiting if self.saturated else s.running)]
        return wanted or list(self.samples)  # requests of one token have ended by the end of their step

    def shares(self) -> dict[str, float]:
        """Average share of the pool in each state; they add up to 1."""
        total = self.pool_tokens * len(self.loaded)
        return {name: sum(getattr(s, name) for s in self.loaded) / total for name in CATEGORIES}

    @property
    def waste(self) -> float:
        """Share of the *allocated* slots that held no token: what the paper's "below 4 %" is about."""
        held = sum(s.tokens for s in self.loaded)
        allocated = held + sum(s.reserved + s.internal for s in self.loaded)
        return 1 - held / allocated if allocated else 0.0

    @property
    def mean_running(self) -> float:
        return sum(s.running for s in self.loaded) / len(self.loaded)

    @property
    def peak_running(self) -> int:
        return max(s.running for s in self.samples)

    def summary(self) -> dict[str, Any]:
        """Everything above as plain data."""
        return {
            "name": self.name,
            "pool_tokens": self.pool_tokens,
            "shares": self.shares(),
            "waste_of_allocated": self.waste,
            "mean_running": self.mean_running,
            "peak_running": self.peak_running,
            "steps": len(self.samples),
            "loaded_steps": len(self.loaded),
            "saturated": self.saturated,
            "computed_tokens": self.computed_tokens,
            "preemptions": self.preemptions,
        }


def check_trace(trace: Sequence[TraceRequest], context: int, pool_tokens: int) -> None:
    """Raise ValueError for a trace that a context or a pool could not serve."""
    longest = max(r.prompt_tokens + r.output_tokens for r in trace)
    if longest > context:
        raise ValueError(
            f"the trace has a request of {longest} tokens, the context is {context}: raise the context"
        )
    if pool_tokens < context:
        raise ValueError(
            f"a pool of {pool_tokens} tokens cannot reserve one context of {context}: "
            "raise the pool or lower the context"
        )


class TraceRunner(Runner):
    """Ends each request at its trace's length, without a model; the request's seed is its number in the trace."""

    END = 0
    vocab_size = 32000

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        from paged_backend.runner.sampler import Sampled

        self._lengths = [r.output_tokens for r in trace]
        self._sampled = Sampled
        self.computed_tokens = 0

    def run(self, works: Sequence[Any]) -> list[Any]:
        self.computed_tokens += sum(len(work.token_ids) for work in works)
        return [Result([self._sampled(self._next(row)) for row in work.rows], []) for work in works]

    def _next(self, row: Any) -> int:
        done = row.num_output_tokens + 1
        return self.END if done >= self._lengths[row.seed] else 1 + (row.seed + done) % (self.vocab_size - 1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass  # there is nothing in the blocks

    def give_back(self, blocks: Sequence[int]) -> bool:
        return False  # the pool lives as long as the run


def run_paged(
    trace: Sequence[TraceRequest],
    *,
    pool_tokens: int,
    block_size: int = 16,
    context: int = 2048,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 512,
    runner: TraceRunner | None = None,
    window: int | None = None,
) -> MemoryRun:
    """The trace through EngineCore. runner: of the same trace. window: of a model with sliding attention, in tokens."""
    from paged_backend.cache.manager import CacheManager
    from paged_backend.engine.core import EngineCore
    from paged_backend.engine.scheduler import Scheduler

    check_trace(trace, context, pool_tokens // block_size * block_size)
    runner = runner or TraceRunner(trace)
    cache = CacheManager(pool_tokens // block_size + 1, block_size, window)
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    core = EngineCore(runner, cache, scheduler, context)
    coming = sorted(range(len(trace)), key=lambda i: trace[i].arrival)
    samples: list[Sample] = []
    now = finished = 0
    while coming or core.has_work:
        while coming and trace[coming[0]].arrival <= now:
            core.add(_request(coming.pop(0), trace, context, runner.vocab_size))
        if core.has_work:
            updates = core.step()
            finished += sum(u.finish_reason == "stop" for u in updates)
            samples.append(_paged_sample(core, trace))
        now += 1
    core.check()
    if finished != len(trace) or cache.pool.num_used:
        raise RuntimeError(
            f"{finished} of {len(trace)} requests ended as the trace says, {cache.pool.num_used} blocks leaked"
        )
    return MemoryRun(
        "paged", cache.capacity_tokens, samples, runner.computed_tokens, scheduler.stats.num_preemptions
    )


def _request(index: int, trace: Sequence[TraceRequest], context: int, vocab_size: int) -> Any:
    """Prompt of random ids (no prefix is shared), allowed to grow to the end of the context."""
    from paged_backend.engine.request import Request
    from paged_backend.sampling_params import SamplingParams

    count = trace[index].prompt_tokens
    prompt = random.Random(index).choices(range(1, vocab_size), k=count)
    params = SamplingParams(temperature=0, max_tokens=context - count).resolved()
    return Request(f"trace-{index}", prompt, params, seed=index, stop_ids=(TraceRunner.END,))


def _paged_sample(core: Any, trace: Sequence[TraceRequest]) -> Sample:
    size, pool = core.cache.block_size, core.cache.pool
    tokens = reserved = internal = 0
    for request in core.scheduler.requests():
        passed = request.table.num_holes * size  # a sliding window has freed these
        held = len(request.table) * size - passed
        wanted = trace[request.seed].prompt_tokens + trace[request.seed].output_tokens - 1 - passed
        now = max(request.num_computed - passed, 0)
        tokens += now
        reserved += min(held, wanted) - now
        internal += held - min(held, wanted)
    unallocated = (
        pool.capacity * size - tokens - reserved - internal
    )  # any free block serves anybody: none is external
    return Sample(
        tokens, reserved, internal, 0, unallocated, len(core.scheduler.running), len(core.scheduler.waiting)
    )
