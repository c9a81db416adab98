"""The commands about parts: ``step``, ``scheduler`` and ``grammars``.

``register`` hangs them into a command line. Nothing heavy is imported until one runs.
"""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.compare.commands import Cores, Json, Model, complain, cores_of
from benchmarks.compare.contenders import VARIANTS
from paged_backend.cli.tables import aligned


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for function in (step, scheduler, grammars):
        app.command(function.__name__)(function)


def step(
    model: Model = "demo",
    running: Annotated[
        list[int] | None, typer.Option(help="Running requests; may be repeated. Default: 1, 8 and 64.")
    ] = None,
    variant: Annotated[
        str, typer.Option(help=f"One of {', '.join(VARIANTS)}, or NAME:engine_option=value,...")
    ] = "auto",
    steps: Annotated[int, typer.Option(help="Steps to measure.")] = 50,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    cores: Cores = "0",
    json: Json = None,
) -> None:
    """Where the time of one decode step goes: inside kernels, and outside of them part by part."""
    from benchmarks.compare.contenders import parse_variant
    from benchmarks.parts.step import PARTS, profile_steps
    from paged_backend.errors import PagedBackendError

    threads = _pin(cores_of(cores))
    counts = running or [1, 8, 64]
    try:
        options = {"threads": threads, **parse_variant(variant, sys.executable).options}
        profiles = profile_steps(model, counts, steps, context, **options)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    except PagedBackendError as error:
        raise typer.Exit(complain(str(error))) from error
    lines = [["ms per step", *(f"{p.running} running" for p in profiles)]]
    for name in PARTS:
        lines.append([name, *(f"{p.parts[name]:.3f}" for p in profiles)])
    lines.append(["step", *(f"{p.total_ms:.3f}" for p in profiles)])
    lines.append(["outside kernels", *(f"{p.outside:.1%}" for p in profiles)])
    lines.append(["outside C code", *(f"{p.outside_c:.1%}" for p in profiles)])
    typer.echo(aligned(lines))
    if json is not None:
        data = [
            {**asdict(p), "total_ms": p.total_ms, "outside": p.outside, "outside_c": p.outside_c}
            for p in profiles
        ]
        json.write_text(json_module.dumps(data, indent=1), encoding="utf-8")


def scheduler(
    running: Annotated[
        list[int] | None,
        typer.Option(help="Running requests; may be repeated. Default: 1, 8 and 64."),
    ] = None,
    waiting: Annotated[int, typer.Option(help="Requests that wait at a full pool meanwhile.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps to measure.")] = 200,
    device_ms: Annotated[
        float | None,
        typer.Option(
            help="Instead: how long a step lasts on a device that computes so long for it, with the next one launched "
            "when it is done and before."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Microseconds that scheduler and cache take per decode step (median), without a model."""
    from dataclasses import asdict

    from benchmarks.parts.scheduler import measure_overlap, measure_step

    if device_ms is not None:
        if waiting:
            raise typer.BadParameter("--waiting is not for --device-ms")
        try:
            times = [measure_overlap(count, device_ms, steps=steps) for count in running or [1, 8, 64]]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if json:
            typer.echo(json_module.dumps([asdict(found) for found in times]))
            return
        rows = [["running", "device", "in turn", "ahead"]]
        rows += [
            [str(t.running), *(f"{value:.0f}" for value in (t.device, t.in_turn, t.ahead))] for t in times
        ]
        typer.echo(f"median microseconds of a decode step, {steps} steps\n\n{aligned(rows)}")
        return

    try:
        costs = [measure_step(count, waiting=waiting, steps=steps) for count in running or [1, 8, 64]]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        typer.echo(json_module.dumps([{**asdict(cost), "total": cost.total} for cost in costs]))
        return
    rows = [["running", "waiting", "schedule", "build", "commit", "total"]]
    for cost in costs:
        figures = (cost.schedule, cost.build, cost.commit, cost.total)
        rows.append([str(cost.running), str(cost.waiting), *(f"{value:.0f}" for value in figures)])
    typer.echo(f"median microseconds of a decode step, {steps} steps\n\n{aligned(rows)}")


def grammars(
    model: Model = "demo",
    requests: Annotated[int, typer.Option(help="Requests that run at once.")] = 32,
    tokens: Annotated[int, typer.Option(help="Most tokens of each.")] = 48,
    kernels: Annotated[str, typer.Option(help="Of the engine.")] = "auto",
) -> None:
    """What a JSON schema adds to a step, per token and as a share of the step, on one thread."""
    from benchmarks.parts.grammars import measure_grammars
    from paged_backend.errors import PagedBackendError

    try:
        cost = measure_grammars(model, requests, tokens, kernels=kernels)
    except (PagedBackendError, ValueError) as error:
        raise typer.Exit(complain(str(error))) from error
    rows = [["", "us a token", "share of the step"]]
    rows += [[name, f"{1e6 * each:.0f}", f"{cost.share(name):.2%}"] for name, each in cost.parts.items()]
    total = sum(cost.share(name) for name in cost.parts)
    rows.append(["all", f"{1e6 * sum(cost.parts.values()):.0f}", f"{total:.2%}"])
    typer.echo(f"a step of {requests} requests: {1e3 * cost.step:.1f} ms\n\n{aligned(rows)}")


def _pin(cores: Sequence[int]) -> int:
    """Bind this process to ``cores``; returns the number of threads to compute with."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    return len(cores) or os.cpu_count() or 1
