"""From runs to rows: what each benchmark reads off a run, medians over the runs, and ratios to the baseline.

A ratio is taken turn by turn (the two runs of a turn lie close in time, so a slow minute of the machine hits both) and
the median of these is reported. ``tok/cpu s`` divides by the processor time of the run instead of the time on the
clock: on a machine that is busy with other things it is the fairer figure, on a quiet one the two agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.compare.harness import RunResult

Measure = Callable[[RunResult], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row. form: how it is printed. plot: whether the picture has a panel for it."""

    key: str
    title: str
    form: str = "{:.1f}"
    plot: bool = False


@dataclass(frozen=True, slots=True)
class Benchmark:
    """measure: figures of one run. key: the figure that ratios are about; higher: whether more of it is better."""

    name: str
    measure: Measure
    columns: tuple[Column, ...]
    key: str
    higher: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One contender. values: medians. spread: (least, most) of the key figure. ratio: to the baseline, above 1 is
    better; cpu_ratio: the same by processor time."""

    label: str
    ours: bool
    error: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    spread: tuple[float, float] = (0.0, 0.0)
    ratio: float | None = None
    cpu_ratio: float | None = None
    agreement: float | None = None
    runs: Sequence[Mapping[str, float]] = ()
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def rows(
    benchmark: Benchmark,
    results: Mapping[str, Sequence[RunResult]],
    ours: frozenset[str],
    whole: int | None = None,
    baseline: str | None = None,
) -> tuple[list[Row], str | None]:
    """Rows in the order of ``results``, and the label of the baseline: the one asked for, else the best peer, else the
    first row that has figures. whole: number of requests of the workload; a row with fewer gets a note."""
    figures: dict[str, list[dict[str, float]]] = {}
    errors: dict[str, str] = {}
    for label, runs in results.items():
        error = next((r.error for r in runs if r.error is not None), None if runs else "it was not run")
        if error is None:
            try:
                figures[label] = [{**benchmark.measure(r), **_common(r)} for r in runs]
            except ValueError as problem:
                error = str(problem)
        if error is not None:
            errors[label] = error
    base = _baseline(benchmark, figures, ours, baseline)
    first = next(iter(figures), None)
    table = []
    for label, runs in results.items():
        if label in errors:
            table.append(Row(label, label in ours, errors[label]))
            continue
        mine = figures[label]
        keys = [f[benchmark.key] for f in mine]
        count = len(runs[0].requests)
        table.append(
            Row(
                label,
                label in ours,
                values={key: median(f[key] for f in mine) for key in mine[0]},
                spread=(min(keys), max(keys)),
                ratio=_ratio(mine, figures[base], benchmark.key, benchmark.higher) if base else None,
                cpu_ratio=_ratio(mine, figures[base], "tokens_per_cpu_s", True) if base else None,
                agreement=_agreement(runs[0], results[first][0]) if first and first != label else None,
                runs=mine,
                note=f"first {count} requests" if whole is not None and count < whole else "",
                versions=runs[0].versions,
            )
        )
    return table, base


def _baseline(
    benchmark: Benchmark,
    figures: Mapping[str, Sequence[Mapping[str, float]]],
    ours: frozenset[str],
    asked: str | None,
) -> str | None:
    if asked is not None:
        return asked if asked in figures else None
    peers = [label for label in figures if label not in ours]
    pick = max if benchmark.higher else min
    if peers:
        return pick(peers, key=lambda label: median(f[benchmark.key] for f in figures[label]))
    return next(iter(figures), None)


def _ratio(
    mine: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], key: str, higher: bool
) -> float:
    ratios = [a[key] / b[key] for a, b in zip(mine, theirs)]
    return median(ratios if higher else [1 / r for r in ratios])


def _agreement(run: RunResult, other: RunResult) -> float:
    """Share of requests whose first token is the same: a check that both ran the same model on the same prompts."""
    pairs = list(zip(run.tokens, other.tokens))
    return sum(a[0] == b[0] for a, b in pairs) / len(pairs)


def _common(run: RunResult) -> dict[str, float]:
    found = {"load_s": run.load_s, "cpu_share": run.cpu_s / run.wall_s}
    found["tokens_per_cpu_s"] = sum(r.output for r in run.requests) / run.cpu_s
    if run.peak_rss_mb is not None:
        found["peak_rss_mb"] = run.peak_rss_mb
    return found


_TAIL = (
    Column("tokens_per_cpu_s", "tok/cpu s"),
    Column("cpu_share", "cpu share", "{:.0%}"),
    Column("load_s", "load s"),
    Column("peak_rss_mb", "peak MB", "{:.0f}", plot=True),
)


def _throughput(run: RunResult) -> dict[str, float]:
    firsts = [t[0] for t in run.times if t]
    found = {"tokens_per_s": run.tokens_per_s, "wall_s": run.wall_s}
    if len(firsts) == len(run.times):
        found["first_token_s"] = median(firsts)
    return found


THROUGHPUT = Benchmark(
    "throughput",
    _throughput,
    (Column("tokens_per_s", "tok/s", plot=True), Column("first_token_s", "1st token s"), *_TAIL),
    "tokens_per_s",
)


def _streams(run: RunResult) -> list[Sequence[float]]:
    streams = [t for t in run.times if t is not None and len(t) > 1]
    if len(streams) != len(run.times):
        raise ValueError(f"{run.label} gave no time for each token")
    return streams


def _latency(run: RunResult) -> dict[str, float]:
    streams = _streams(run)
    return {
        "ms_per_token": median(1000 * (t[-1] - t[0]) / (len(t) - 1) for t in streams),
        "first_token_ms": median(1000 * t[0] for t in streams),
        "tokens_per_s": run.tokens_per_s,
    }


LATENCY = Benchmark(
    "latency",
    _latency,
    (
        Column("ms_per_token", "ms/token", "{:.2f}", plot=True),
        Column("first_token_ms", "1st token ms", plot=True),
        Column("tokens_per_s", "tok/s"),
        *_TAIL,
    ),
    "ms_per_token",
    higher=False,
)

PREFIX = Benchmark(
    "prefix",
    lambda run: {"wall_s": run.wall_s, "tokens_per_s": run.tokens_per_s},
    (Column("wall_s", "seconds", "{:.2f}", plot=True), Column("tokens_per_s", "tok/s"), *_TAIL),
    "wall_s",
    higher=False,
)


def _longcontext(run: RunResult) -> dict[str, float]:
    """Gaps between tokens of the requests that ran when the long prompt entered, before and after it did."""
    running = [t for r, t in zip(run.requests, run.times) if not r.after and t is not None]
    late = [(r, t) for r, t in zip(run.requests, run.times) if r.after and t]
    if len(running) + len(late) != len(run.requests):
        raise ValueError(f"{run.label} gave no time for each token")
    request, late_times = late[0]
    entered, answered = max(t[request.after - 1] for t in running), late_times[0]
    before, during = [], []
    for times in running:
        for a, b in itertools.pairwise(times):
            if b - a > 1e-4:  # tokens that were handed over together
                if b <= entered:
                    before.append(b - a)
                elif a < answered:
                    during.append(b - a)
    steps = before + during
    return {
        "longest_gap_ms": 1000 * max(during),
        "median_step_ms": 1000 * median(steps),
        "before_ms": 1000 * median(before),
        "during_ms": 1000 * median(during),
        "gap_ratio": max(during) / median(steps),
        "gap_ratio_during": max(during) / median(during),
        "long_first_token_s": answered - entered,
    }


LONGCONTEXT = Benchmark(
    "longcontext",
    _longcontext,
    (
        Column("longest_gap_ms", "longest gap ms", plot=True),
        Column("before_ms", "step before ms"),
        Column("during_ms", "step during ms"),
        Column("gap_ratio", "gap/median", "{:.2f}"),
        Column("gap_ratio_during", "gap/during", "{:.2f}"),
        Column("long_first_token_s", "prompt s", "{:.2f}", plot=True),
        *_TAIL,
    ),
    "longest_gap_ms",
    higher=False,
)
