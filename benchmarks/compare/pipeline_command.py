"""The command ``python -m benchmarks pipeline``; what it measures is told in ``pipeline``."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.commands import (
    Cores,
    Json,
    Model,
    Plot,
    Repeats,
    Seed,
    Threads,
    Timeout,
    Workdir,
    complain,
    cores_of,
    show_run,
)
from benchmarks.compare.contenders import VARIANTS, WORKERS, Contender, parse_variant
from benchmarks.compare.harness import Settings, alternate


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("pipeline")(pipeline)


def pipeline(
    model: Model = "demo",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Ours: {', '.join(VARIANTS)}, or NAME:engine_option=value,...; may be repeated. "
            "Default: fp32, bf16 and int8."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Chats, all in one call of the pipeline.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Of transformers' pipeline.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let every answer have max_new_tokens.")
    ] = False,
    cores: Cores = "0",
    threads: Threads = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    timeout: Timeout = 1800,
    json: Json = None,
    plot: Plot = None,
    workdir: Workdir = None,
) -> None:
    """Answers per second of our text-generation pipeline beside transformers' own, on the same float32 folder."""
    from benchmarks.compare import report
    from benchmarks.compare.export import export
    from benchmarks.compare.measures import rows
    from benchmarks.compare.pipeline import PIPELINE, chats, run_once, same_answers
    from paged_backend.errors import PagedBackendError

    pinned = cores_of(cores)
    for name, value in (("repeats", repeats), ("batch-size", batch_size), ("max-new-tokens", max_new_tokens)):
        if value < 1:
            raise typer.BadParameter(f"--{name} must be at least 1, got {value}")
    settings = Settings(pinned, threads or len(pinned) or os.cpu_count() or 1, repeats, timeout)
    call = {"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
    try:
        contenders = _contenders(variant or ["fp32", "bf16", "int8"], batch_size, call)
        prompts = chats(requests, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = (
        f"pipeline: {len(prompts)} chats in one call, greedy, at most {max_new_tokens} new tokens"
        f"{' (all of them)' if ignore_eos else ''}, cores {cores}, {settings.threads} thread(s), "
        f"median of {repeats}"
    )
    typer.echo(title, err=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = str(export(model, "hf-float32", workdir if workdir is not None else Path(scratch)))
            results = alternate(
                contenders, lambda c: run_once(prompts, c, folder, settings), repeats, show_run
            )
        table, base = rows(PIPELINE, results, frozenset(c.label for c in contenders if c.ours))
        lines = [title, "", report.table(PIPELINE, table, base), *same_answers(results, base)]
        typer.echo("\n".join(lines))
        if json is not None:
            json.write_text(report.as_json(title, table, base, asdict(settings)), encoding="utf-8")
        if plot is not None:
            report.plot(PIPELINE, table, plot, f"{title}\n{report.cpu_name()}")
    except (PagedBackendError, OSError, ValueError) as error:
        raise typer.Exit(complain(str(error))) from error
    if all(row.error is not None for row in table):
        raise typer.Exit(1)


def _contenders(variants: Sequence[str], batch_size: int, call: Mapping[str, object]) -> list[Contender]:
    """transformers first. Raises ValueError."""
    worker = WORKERS / "run_pipeline.py"
    made = [
        Contender(
            f"transformers batch_size={batch_size}",
            sys.executable,
            worker,
            {"side": "transformers", "batch_size": batch_size, **call},
        )
    ]
    for text in variants:
        variant = parse_variant(text, sys.executable)
        if variant.limit is not None:
            raise ValueError("requests= after a variant has no place here: use --requests")
        if variant.label in [c.label for c in made]:
            raise ValueError(f"{variant.label!r} is there twice")
        made.append(replace(variant, worker=worker, options={"side": "ours", **call, **variant.options}))
    return made
