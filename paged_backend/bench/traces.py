"""Request traces: prompt and output lengths, and when each request arrives, counted in steps.

The presets have the mean lengths and the cap that the PagedAttention paper gives for its two workloads. The shape
between these is our assumption: lognormal, clipped at the cap, with its median solved so that the mean *after*
clipping is the paper's.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. arrival: the step before which it arrives, fractional."""

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A clipped lognormal: ``mean`` of the clipped value, ``sigma`` of the logarithm, ``cap``."""

    mean: float
    sigma: float
    cap: int

    def median(self) -> float:
        """The lognormal's median that gives ``mean`` after clipping at ``cap``."""
        if not 1 <= self.mean < self.cap:
            raise ValueError(f"the mean length {self.mean} must lie in [1, {self.cap}), below the cap")
        low, high = 0.0, math.log(self.cap) + 20 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            if self._clipped_mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return math.exp(low)

    def _clipped_mean(self, mu: float) -> float:
        normal, cap = NormalDist(), math.log(self.cap)
        below = math.exp(mu + self.sigma**2 / 2) * normal.cdf((cap - mu - self.sigma**2) / self.sigma)
        return below + self.cap * (1 - normal.cdf((cap - mu) / self.sigma))


PRESETS: Mapping[str, tuple[Lengths, Lengths]] = {
    "sharegpt": (Lengths(161, 1.2, 1024), Lengths(338, 0.9, 1024)),
    "alpaca": (Lengths(19, 0.6, 1024), Lengths(58, 1.0, 1024)),
}
"""(prompt, output) lengths by name."""


def make_trace(
    preset: str = "sharegpt",
    num_requests: int = 256,
    seed: int = 0,
    rate: float | None = None,
    longest: int = 2048,
) -> list[TraceRequest]:
    """``num_requests`` drawn from a preset; the same seed gives the same trace.

    rate: mean arrivals per step (Poisson); None lets all arrive before the first step. longest: prompt + output never
    exceed it; the output gives way, then the prompt.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown trace {preset!r}: choose one of {', '.join(PRESETS)}")
    if num_requests < 1:
        raise ValueError(f"a trace needs at least one request, got {num_requests}")
    if longest < 2:
        raise ValueError(f"longest must leave room for a prompt and an output token, got {longest}")
    rng = random.Random(seed)
    prompts, outputs = PRESETS[preset]
    mu_in, mu_out = math.log(prompts.median()), math.log(outputs.median())
    trace = []
    arrival = _Arrivals(rng, rate)
    for _ in range(num_requests):
        count_in = _clip(rng.lognormvariate(mu_in, prompts.sigma), min(prompts.cap, longest - 1))
        count_out = _clip(rng.lognormvariate(mu_out, outputs.sigma), min(outputs.cap, longest - count_in))
        trace.append(TraceRequest(count_in, count_out, arrival.next()))
    return trace


def read_trace(
    path: Path, seed: int = 0, rate: float | None = None, longest: int = 2048
) -> list[TraceRequest]:
    """Lengths measured elsewhere: JSON lines with ``prompt_tokens`` and ``output_tokens``.

    Raises ValueError naming the line that is not usable.
    """
    arrival = _Arrivals(random.Random(seed), rate)
    trace = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            counts = entry["prompt_tokens"], entry["output_tokens"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}:{number}: expected a JSON object with prompt_tokens and output_tokens"
            ) from None
        if not all(isinstance(n, int) and n >= 1 for n in counts) or sum(counts) > longest:
            raise ValueError(
                f"{path}:{number}: lengths must be integers >= 1 with a sum of at most {longest}, got {counts}"
            )
        trace.append(TraceRequest(*counts, arrival.next()))
    if not trace:
        raise ValueError(f"{path} has no requests")
    return trace


def mean_lengths(trace: Sequence[TraceRequest]) -> tuple[float, float]:
    """Mean prompt and output length."""
    return (
        sum(r.prompt_tokens for r in trace) / len(trace),
        sum(r.output_tokens for r in trace) / len(trace),
    )


class _Arrivals:
    """Times of a Poisson process, or always 0."""

    def __init__(self, rng: random.Random, rate: float | None) -> None:
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"rate must be a number of requests per step > 0, got {rate}")
        self._rng = random.Random(rng.random())  # its own stream: the lengths must not depend on the rate
        self._rate = rate
        self._now = 0.0

    def next(self) -> float:
        if self._rate is not None:
            self._now += self._rng.expovariate(self._rate)
        return self._now


def _clip(length: float, cap: int) -> int:
    return max(1, min(round(length), cap))
