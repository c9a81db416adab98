"""What engines are asked to do: prompts of random token ids and the length of each answer, by seed.

Random ids, because the time of a dense model does not depend on what is said, and no text need be shipped. Lengths are
clipped lognormals whose mean after clipping is the stated one (see traces.py); a drawn set is then scaled to that mean,
so that 64 requests of any seed are the same amount of work.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from paged_backend.bench.traces import Lengths

PROMPTS, OUTPUTS = Lengths(144, 1.0, 1024), Lengths(118, 0.7, 256)
"""Lengths of the throughput workload: ShareGPT-like, as chats are."""
SHORTEST_CONTEXT = 512
"""Tokens that leave room for such prompts beside the longest answer."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. after: it enters when each request with ``after`` 0 has made that many tokens; 0 is at the start."""

    prompt: tuple[int, ...]
    output: int
    after: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: what is measured. warmup: run before, unmeasured. max_len, max_seqs: what an engine must be ready for.

    one_by_one: each waits for the one before. stream: the time of every token is wanted. prefix_cache: whether engines
    may share computed prefixes.
    """

    name: str
    requests: tuple[BenchRequest, ...]
    warmup: tuple[BenchRequest, ...]
    max_len: int
    max_seqs: int
    one_by_one: bool = False
    stream: bool = False
    prefix_cache: bool = False

    @property
    def output_tokens(self) -> int:
        return sum(r.output for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)

    def first(self, count: int) -> Workload:
        """Only the first ``count`` requests, for peers that would take too long."""
        return replace(self, requests=self.requests[:count])


def draw_lengths(lengths: Lengths, count: int, rng: random.Random) -> list[int]:
    """``count`` lengths whose mean is the stated one (to a fraction of a token, while the cap allows)."""
    mu = math.log(lengths.median())
    raw = [rng.lognormvariate(mu, lengths.sigma) for _ in range(count)]
    low, high = 0.01, 100.0
    for _ in range(60):  # the mean of the clipped lengths grows with the scale
        middle = math.sqrt(low * high)
        mean = sum(min(max(x * middle, 1), lengths.cap) for x in raw) / count
        low, high = (middle, high) if mean < lengths.mean else (low, middle)
    return [round(min(max(x * low, 1), lengths.cap)) for x in raw]


def throughput(vocab_size: int, count: int = 64, seed: int = 0, context: int = 2048) -> Workload:
    """``count`` requests at once; useful output tokens per second.

    context: prompt + output of no request exceed it. Raises ValueError if chats do not fit into so few tokens.
    """
    at_least("requests", count, 1)
    at_least("the context", context, SHORTEST_CONTEXT)
    rng = random.Random(seed)
    prompts = draw_lengths(replace(PROMPTS, cap=min(PROMPTS.cap, context - OUTPUTS.cap)), count, rng)
    outputs = draw_lengths(OUTPUTS, count, rng)
    requests = tuple(BenchRequest(random_ids(rng, n, vocab_size), m) for n, m in zip(prompts, outputs))
    warmup = tuple(BenchRequest(random_ids(rng, 32, vocab_size), 4) for _ in range(min(count, 8)))
    longest = max(len(r.prompt) + r.output for r in requests)
    return Workload("throughput", requests, warmup, round_up(longest + 1), count)


def latency(vocab_size: int, count: int = 8, prompt: int = 128, output: int = 64, seed: int = 0) -> Workload:
    """One request at a time; time to the first token and per token."""
    at_least("requests", count, 1)
    at_least("prompt", prompt, 1)
    at_least("output", output, 2)
    rng = random.Random(seed)
    requests = tuple(BenchRequest(random_ids(rng, prompt, vocab_size), output) for _ in range(count))
    warmup = (BenchRequest(random_ids(rng, prompt, vocab_size), 4),)
    return Workload(
        "latency", requests, warmup, round_up(prompt + output + 1), 1, one_by_one=True, stream=True
    )


def random_ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """``count`` ids of a vocabulary; the same from the same state of ``rng``."""
    low = min(100, vocab_size // 2)  # the first ids of a vocabulary are often special
    return tuple(rng.randrange(low, vocab_size) for _ in range(count))


def round_up(length: int, to: int = 64) -> int:
    """The next multiple of ``to``."""
    return -(-length // to) * to


def at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError if ``value`` is less than ``least``."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
