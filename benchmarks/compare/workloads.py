"""Workloads for comparisons alone: a shared prefix, and a long prompt among others. What the package's own commands ask
for as well is in ``paged_backend.bench.workloads``."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paged_backend.bench.workloads import BenchRequest, Workload, at_least, random_ids, round_up


def prefix(
    vocab_size: int,
    cached: bool,
    count: int = 32,
    shared: int = 1000,
    tail: int = 16,
    output: int = 16,
    seed: int = 0,
) -> Workload:
    """``count`` requests at once that begin with the same ``shared`` tokens, with or without the prefix cache."""
    at_least("requests", count, 2)
    rng = random.Random(seed)
    common = random_ids(rng, shared, vocab_size)
    requests = tuple(BenchRequest(common + random_ids(rng, tail, vocab_size), output) for _ in range(count))
    warmup = tuple(BenchRequest(random_ids(rng, 48, vocab_size), 4) for _ in range(4))
    name = "prefix, cached" if cached else "prefix, not cached"
    return Workload(name, requests, warmup, round_up(shared + tail + output + 1), count, prefix_cache=cached)


def longcontext(
    vocab_size: int, running: int = 16, prompt: int = 8000, output: int = 96, after: int = 16, seed: int = 0
) -> Workload:
    """A prompt of ``prompt`` tokens enters while ``running`` others decode; how long do they wait for it?"""
    at_least("running", running, 1)
    if not 1 <= after < output:
        raise ValueError(
            f"after must be in [1, output): the long prompt enters while others run, got {after}"
        )
    rng = random.Random(seed)
    requests = [BenchRequest(random_ids(rng, 64, vocab_size), output) for _ in range(running)]
    requests.append(BenchRequest(random_ids(rng, prompt, vocab_size), 8, after))
    warmup = tuple(BenchRequest(random_ids(rng, 64, vocab_size), 4) for _ in range(running))
    return Workload("longcontext", tuple(requests), warmup, prompt + 192, running + 1, stream=True)


def as_json(requests: Sequence[BenchRequest]) -> list[dict[str, object]]:
    """The requests as a worker reads them."""
    return [{"prompt": list(r.prompt), "output": r.output, "after": r.after} for r in requests]
