"""Contiguous reservation, which paged attention replaced: the baselines of the memory benchmark.

They keep the iteration-level scheduling (decodes first, then prefill chunks, then admission with bounded skip-ahead,
one token budget), so that only the memory policy differs from ``paged_backend.bench.memory``. A request reserves its
slots in one piece when it is admitted, and holds them until it ends:

    max     the whole context
    pow2    the prompt, and the output's true length rounded up to a power of two (the paper's Orca (Pow2))
    oracle  exactly what the request will use, which nobody can know
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory.arena import Arena, BuddyArena, FirstFitArena
from paged_backend.bench.memory import MemoryRun, Sample, check_trace
from paged_backend.bench.traces import TraceRequest

POLICIES = ("max", "pow2", "oracle")
PLACEMENTS = ("first-fit", "buddy")
MAX_SKIPS = 32
"""How many times a request lets smaller ones pass; the scheduler's own default."""


@dataclass(slots=True)
class _Job:
    """A request of a baseline. ``known`` tokens of prompt and output, ``computed`` of them with KV."""

    prompt: int
    slots: int
    """Slots it will have filled when it ends; the last token's KV is never computed."""
    size: int
    known: int
    computed: int = 0
    address: int = -1
    skipped: int = 0


def reservation(policy: str, request: TraceRequest, context: int) -> int:
    """Slots that ``policy`` sets aside for the request."""
    if policy == "max":
        return context
    if policy == "pow2":
        return min(request.prompt_tokens + (1 << (request.output_tokens - 1).bit_length()), context)
    if policy == "oracle":
        return request.prompt_tokens + request.output_tokens - 1
    raise ValueError(f"unknown policy {policy!r}: choose one of {', '.join(POLICIES)}")


def run_contiguous(
    trace: Sequence[TraceRequest],
    policy: str,
    *,
    pool_tokens: int,
    placement: str = "first-fit",
    context: int = 2048,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 512,
) -> MemoryRun:
    """The trace through a contiguous allocator. placement: ``first-fit``, or ``buddy`` as the paper's."""
    check_trace(trace, context, pool_tokens)
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}: choose one of {', '.join(PLACEMENTS)}")
    arena: Arena = BuddyArena(pool_tokens) if placement == "buddy" else FirstFitArena(pool_tokens)
    coming = sorted(trace, key=lambda r: r.arrival)
    waiting: list[_Job] = []
    running: list[_Job] = []
    samples: list[Sample] = []
    now = computed = 0
    while coming or waiting or running:
        while coming and coming[0].arrival <= now:
            request = coming.pop(0)
            size = reservation(policy, request, context)
            if not arena.fits_empty(size):
                raise ValueError(
                    f"a pool of {pool_tokens} tokens cannot place {size} with {placement}: raise the pool"
                )
            slots = request.prompt_tokens + request.output_tokens - 1
            waiting.append(_Job(request.prompt_tokens, slots, size, known=request.prompt_tokens))
        now += 1
        if not (waiting or running):
            continue
        budget = max_num_batched_tokens
        for job in sorted(
            running, key=lambda j: j.known - j.computed > 1
        ):  # decodes first; the sort is stable
            budget -= _compute(job, budget)
        for job in _admit(waiting, running, arena, budget, max_num_seqs):
            budget -= _compute(job, budget)
        computed += max_num_batched_tokens - budget
        for job in [j for j in running if j.computed == j.slots]:
            arena.release(job.address)
            running.remove(job)
        samples.append(_contiguous_sample(running, waiting, arena))
    return MemoryRun(policy, pool_tokens, samples, computed)


def _compute(job: _Job, budget: int) -> int:
    count = min(job.known - job.computed, budget)
    job.computed += count
    if job.computed == job.known and job.computed < job.slots:
        job.known += 1
    return count


def _admit(waiting: list[_Job], running: list[_Job], arena: Arena, budget: int, seats: int) -> list[_Job]:
    """Start what fits, oldest first; a job may be passed by later ones at most ``MAX_SKIPS`` times."""
    admitted: list[_Job] = []
    blocked: list[_Job] = []
    for job in list(waiting):
        if budget <= 0 or len(running) >= seats or len(blocked) > MAX_SKIPS:
            break
        address = arena.allocate(job.size)
        if address is None:
            if job.skipped >= MAX_SKIPS:
                break
            blocked.append(job)
            continue
        job.address = address
        budget -= job.prompt
        waiting.remove(job)
        running.append(job)
        admitted.append(job)
        for passed in blocked:
            passed.skipped += 1
    return admitted


def _contiguous_sample(running: list[_Job], waiting: list[_Job], arena: Arena) -> Sample:
    tokens = sum(job.computed for job in running)
    used = sum(job.slots for job in running)
    free = arena.size - arena.used
    external = free if waiting and waiting[0].size <= free else 0
    return Sample(
        tokens, used - tokens, arena.used - used, external, free - external, len(running), len(waiting)
    )
