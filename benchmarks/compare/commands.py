"""The commands that compare: ``throughput``, ``latency``, ``prefix`` and ``longcontext``.

``register`` hangs them into a command line. Nothing heavy is imported until one runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.contenders import VARIANTS, Contender, make_contenders
from benchmarks.compare.harness import RunResult, Settings, compare
from benchmarks.drawing import drawable
from paged_backend.bench.workloads import Workload

Model = Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id or 'demo'.")]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="NAME[:option=value,...]=PYTHON; may be repeated. NAME: transformers, transformers-batch, "
        "transformers-generate-batch, vllm, openvino or llama.cpp; PYTHON: the interpreter it is installed for. "
        "Options: weights=f16|q8_0|q4_0, dtype=..., requests=N (only the first N), model=PATH, and the peer's own.",
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help=f"Ours: {', '.join(VARIANTS)}, or NAME:engine_option=value,...; may be repeated. Default: auto.",
    ),
]
Cores = Annotated[str, typer.Option(help="Pin every run to these cores, e.g. 0 or 0,1; 'all' does not pin.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads of every run. Default: one per core.")]
Repeats = Annotated[int, typer.Option(help="Runs of each; they alternate.")]
Seed = Annotated[int, typer.Option(help="Of the workload.")]
Baseline = Annotated[str | None, typer.Option(help="Row that ratios are to. Default: the best peer.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one run may take, loading included.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw them to this file (.png, .svg, .pdf).", callback=drawable),
]
Workdir = Annotated[
    Path | None,
    typer.Option(help="Where the model is kept in the peers' formats. Default: a temporary folder."),
]


@dataclass(frozen=True, slots=True)
class _Common:
    """The options that all comparisons share."""

    model: str
    peer: Sequence[str] | None
    variant: Sequence[str] | None
    cores: str
    threads: int | None
    repeats: int
    timeout: float
    baseline: str | None
    json: Path | None
    plot: Path | None
    workdir: Path | None

    def settings(self) -> Settings:
        cores = cores_of(self.cores)
        if self.repeats < 1:
            raise typer.BadParameter(f"--repeats must be at least 1, got {self.repeats}")
        threads = self.threads or len(cores) or os.cpu_count() or 1
        return Settings(cores, threads, self.repeats, self.timeout)

    def contenders(self) -> list[Contender]:
        variants = self.variant if self.variant is not None else ["auto"]
        try:
            return make_contenders(variants, self.peer or (), sys.executable)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error


def register(app: typer.Typer) -> None:
    """Add the commands that compare to ``app``."""
    for function in (throughput, latency, prefix, longcontext):
        app.command(function.__name__)(function)


def throughput(
    model: Model = "demo",
    peer: Peers = None,
    variant: Variants = None,
    requests: Annotated[int, typer.Option(help="Requests, all there at the start.")] = 64,
    cores: Cores = "0",
    threads: Threads = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    timeout: Timeout = 1800,
    baseline: Baseline = None,
    json: Json = None,
    plot: Plot = None,
    workdir: Workdir = None,
) -> None:
    """Useful output tokens per second for many requests of chat-like lengths at once."""
    from paged_backend.bench import workloads

    common = _Common(model, peer, variant, cores, threads, repeats, timeout, baseline, json, plot, workdir)
    _run("THROUGHPUT", common, lambda vocab: workloads.throughput(vocab, requests, seed))


def latency(
    model: Model = "demo",
    peer: Peers = None,
    variant: Variants = None,
    requests: Annotated[int, typer.Option(help="Requests, one after another.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    cores: Cores = "0",
    threads: Threads = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    timeout: Timeout = 1800,
    baseline: Baseline = None,
    json: Json = None,
    plot: Plot = None,
    workdir: Workdir = None,
) -> None:
    """Time per token and to the first token, one request at a time."""
    from paged_backend.bench import workloads

    common = _Common(model, peer, variant, cores, threads, repeats, timeout, baseline, json, plot, workdir)
    _run("LATENCY", common, lambda vocab: workloads.latency(vocab, requests, prompt, output, seed))


def prefix(
    model: Model = "demo",
    peer: Peers = None,
    variant: Variants = None,
    requests: Annotated[
        int, typer.Option(help="Requests that share the prefix, all there at the start.")
    ] = 32,
    shared: Annotated[int, typer.Option(help="Tokens of the prefix.")] = 1000,
    tail: Annotated[int, typer.Option(help="Tokens of each prompt after it.")] = 16,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 16,
    cores: Cores = "0",
    threads: Threads = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    timeout: Timeout = 1800,
    baseline: Baseline = None,
    json: Json = None,
    plot: Plot = None,
    workdir: Workdir = None,
) -> None:
    """Seconds for requests that share a long prefix, with and without the prefix cache."""
    from benchmarks.compare import workloads

    def make(vocab: int) -> dict[str, Workload]:
        return {
            name: workloads.prefix(vocab, cached, requests, shared, tail, output, seed)
            for name, cached in ((" cached", True), (" not cached", False))
        }

    common = _Common(model, peer, variant, cores, threads, repeats, timeout, baseline, json, plot, workdir)
    _run("PREFIX", common, make)


def longcontext(
    model: Model = "demo",
    peer: Peers = None,
    variant: Variants = None,
    running: Annotated[int, typer.Option(help="Requests that decode when the long prompt enters.")] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of the long prompt.")] = 8000,
    output: Annotated[int, typer.Option(help="Tokens that each of the others makes.")] = 96,
    cores: Cores = "0",
    threads: Threads = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    timeout: Timeout = 1800,
    baseline: Baseline = None,
    json: Json = None,
    plot: Plot = None,
    workdir: Workdir = None,
) -> None:
    """Longest gap between two tokens of running requests while a long prompt enters."""
    from benchmarks.compare import workloads

    common = _Common(model, peer, variant, cores, threads, repeats, timeout, baseline, json, plot, workdir)
    _run(
        "LONGCONTEXT", common, lambda vocab: workloads.longcontext(vocab, running, prompt, output, seed=seed)
    )


def _run(name: str, common: _Common, make: Callable[[int], Workload | dict[str, Workload]]) -> None:
    """make: vocabulary -> the workload, or several that each contender runs, by what is added to its label."""
    from benchmarks.compare import export, measures, report
    from paged_backend.errors import PagedBackendError

    benchmark = getattr(measures, name)
    settings, contenders = common.settings(), common.contenders()
    try:
        load = make(_vocab_size(common.model))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except PagedBackendError as error:
        raise typer.Exit(complain(str(error))) from error
    if isinstance(load, Workload):
        by_label = {c.label: load for c in contenders}
        whole = load
    else:
        by_label = {c.label + suffix: work for c in contenders for suffix, work in load.items()}
        contenders = [replace(c, label=c.label + suffix) for c in contenders for suffix in load]
        whole = next(iter(load.values()))
    if common.baseline is not None and common.baseline not in by_label:
        raise typer.BadParameter(
            f"--baseline: no row {common.baseline!r}; there are {', '.join(map(repr, by_label))}"
        )
    title = (
        f"{benchmark.name}: {len(whole.requests)} requests, {whole.prompt_tokens} tokens in, "
        f"{whole.output_tokens} out, "
        f"cores {common.cores}, {settings.threads} thread(s), median of {settings.repeats}"
    )
    typer.echo(title, err=True)
    with tempfile.TemporaryDirectory() as scratch:
        workdir = common.workdir if common.workdir is not None else Path(scratch)

        def locate(contender: Contender) -> str:
            if contender.model is not None:
                return contender.model
            return (
                str(export.export(common.model, contender.format, workdir))
                if contender.format
                else common.model
            )

        results = compare(by_label, contenders, locate, settings, show_run)
    try:
        ours = frozenset(c.label for c in contenders if c.ours)
        rows, base = measures.rows(benchmark, results, ours, len(whole.requests), common.baseline)
        typer.echo(f"{title}\n\n{report.table(benchmark, rows, base)}")
        if common.json is not None:
            common.json.write_text(report.as_json(title, rows, base, asdict(settings)), encoding="utf-8")
        if common.plot is not None:
            report.plot(benchmark, rows, common.plot, f"{title}\n{report.cpu_name()}")
    except (PagedBackendError, OSError, ValueError) as error:
        raise typer.Exit(complain(str(error))) from error
    if all(row.error is not None for row in rows):
        raise typer.Exit(1)


def show_run(turn: int, result: RunResult) -> None:
    """A line on stderr for a run that has ended."""
    if result.error is not None:
        text = f"failed: {result.error}"
    else:
        text = f"{result.tokens_per_s:.1f} tok/s in {result.wall_s:.1f} s"
    typer.echo(f"  run {turn + 1}  {result.label}: {text}", err=True)


def _vocab_size(model: str) -> int:
    from paged_backend.checkpoints.loading import load_checkpoint
    from paged_backend.checkpoints.resolve import resolve_model

    return int(load_checkpoint(resolve_model(model)).config["vocab_size"])


def cores_of(text: str) -> tuple[int, ...]:
    """``0,1`` -> (0, 1); ``all`` -> (), which means no pinning. Raises typer.BadParameter."""
    try:
        return () if text == "all" else tuple(int(core) for core in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--cores: expected numbers like 0 or 0,1, or 'all', got {text!r}") from None


def complain(text: str) -> int:
    """Say what went wrong; returns the exit status for it."""
    typer.echo(f"paged-backend: {text}", err=True)
    return 1
