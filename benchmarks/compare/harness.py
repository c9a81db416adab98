"""Runs contenders side by side: a fresh process for each run, on the same cores, in turn (A B A B ...), never at once.

Whatever fails is a failed run with its reason: a missing interpreter, a crash, an answer of the wrong length. Nothing
is ever filled in from elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import Contender
from benchmarks.compare.workloads import as_json
from paged_backend.bench.workloads import BenchRequest, Workload


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one contender. error: why it does not count, None if it does.

    tokens, times: per request, the times in seconds since its start (None where the peer gives none).
    """

    label: str
    error: str | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    load_s: float = 0.0
    peak_rss_mb: float | None = None
    loaded_rss_mb: float | None = None
    requests: tuple[BenchRequest, ...] = ()
    tokens: Sequence[Sequence[int]] = ()
    times: Sequence[Sequence[float] | None] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Useful output tokens (those asked for) per second."""
        return sum(r.output for r in self.requests) / self.wall_s


@dataclass(frozen=True, slots=True)
class Settings:
    """cores: what every run is pinned to, empty for no pinning. timeout: seconds per run, loading included."""

    cores: tuple[int, ...] = ()
    threads: int = 1
    repeats: int = 3
    timeout: float = 1800.0


def compare(
    workload: Workload | Mapping[str, Workload],
    contenders: Sequence[Contender],
    locate: Callable[[Contender], str],
    settings: Settings,
    on_run: Callable[[int, RunResult], None] = lambda turn, result: None,
) -> dict[str, list[RunResult]]:
    """Run every contender ``settings.repeats`` times, in turn; label -> its runs in order.

    workload: the same for all, or by label. locate: the path of the model for a contender; what it raises fails the
    contender. A contender that has failed is not run again. on_run: called after each run. Ctrl-C ends it early.
    """

    def run(contender: Contender) -> RunResult:
        load = workload if isinstance(workload, Workload) else workload[contender.label]
        if contender.limit is not None:
            load = load.first(contender.limit)
        return run_once(load, contender, locate, settings)

    return alternate(contenders, run, settings.repeats, on_run)


def alternate(
    contenders: Sequence[Contender],
    run: Callable[[Contender], RunResult],
    repeats: int,
    on_run: Callable[[int, RunResult], None] = lambda turn, result: None,
) -> dict[str, list[RunResult]]:
    """The order of :func:`compare` for any way to run a contender."""
    results: dict[str, list[RunResult]] = {c.label: [] for c in contenders}
    try:
        for turn in range(repeats):
            for contender in contenders:
                runs = results[contender.label]
                if runs and runs[-1].error is not None:
                    continue
                result = run(contender)
                runs.append(result)
                on_run(turn, result)
    except KeyboardInterrupt:
        pass  # what has been measured is worth reporting; who has not run is named as such
    return results


def run_once(
    workload: Workload, contender: Contender, locate: Callable[[Contender], str], settings: Settings
) -> RunResult:
    """One run in a fresh process, checked."""
    try:
        request = {
            "model": locate(contender),
            "options": dict(contender.options),
            "cores": list(settings.cores),
            "threads": settings.threads,
            "max_len": workload.max_len,
            "max_seqs": workload.max_seqs,
            "prefix_cache": workload.prefix_cache,
            "one_by_one": workload.one_by_one,
            "stream": workload.stream,
            "warmup": as_json(workload.warmup),
            "requests": as_json(workload.requests),
        }
        answer = ask(contender, request, settings.timeout)
        return _checked(contender.label, workload, answer)
    except Exception as error:  # one contender's trouble is a line of the table, not the end of the benchmark
        return RunResult(contender.label, error=one_line(error))


class WorkerError(RuntimeError):
    """A worker gave no usable answer."""


def ask(contender: Contender, request: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
    """A fresh worker's answer. timeout: seconds. Raises WorkerError."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "stderr"
        with log.open("wb") as errors:
            try:
                done = subprocess.run(
                    [contender.python, str(contender.worker)],
                    input=json.dumps(request).encode(),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=scratch,
                    timeout=timeout,
                    check=False,
                )
            except OSError as error:
                raise WorkerError(f"cannot start {contender.python}: {error.strerror or error}") from error
            except subprocess.TimeoutExpired:
                raise WorkerError(f"no answer within {timeout:g} s") from None
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it printed nothing"
            raise WorkerError(f"it ended with status {done.returncode} and no answer: {last}") from None
    if not isinstance(answer, dict) or not answer.get("ok"):
        raise WorkerError(str(answer.get("error", "no reason given") if isinstance(answer, dict) else answer))
    return answer


def _checked(label: str, workload: Workload, answer: Mapping[str, Any]) -> RunResult:
    """The answer as a result. Raises WorkerError if the outputs are not as long as asked."""
    items = answer["requests"]
    asked = workload.requests
    if len(items) != len(asked):
        raise WorkerError(f"wrong lengths: {len(items)} answers to {len(asked)} requests")
    for number, (item, request) in enumerate(zip(items, asked)):
        if len(item["tokens"]) != request.output:
            raise WorkerError(
                f"wrong lengths: request {number} has {len(item['tokens'])} tokens, {request.output} were asked for"
            )
    return RunResult(
        label,
        wall_s=answer["wall_s"],
        cpu_s=answer["cpu_s"],
        load_s=answer["load_s"],
        peak_rss_mb=answer.get("peak_rss_mb"),
        loaded_rss_mb=answer.get("loaded_rss_mb"),
        requests=asked,
        tokens=[item["tokens"] for item in items],
        times=[item.get("times") for item in items],
        versions=answer.get("versions", {}),
    )


def one_line(error: Exception) -> str:
    """What went wrong, fit for a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
