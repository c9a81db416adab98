"""The commands ``python -m benchmarks device`` and ``kernels``: the GPU path, run and compiled."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.common import complain
from paged_backend.cli.tables import aligned

if TYPE_CHECKING:
    from benchmarks.device.report import Report

_Json = Annotated[Path | None, typer.Option(help="Write the figures to this file.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("device")(device)
    app.command("kernels")(kernels)


def device(
    json: _Json = None,
    seconds: Annotated[float, typer.Option(help="Begin nothing that would not end by then.")] = 420,
) -> None:
    """Check and time the GPU path: kernels, attention, an 8B model's shape, the demo model. Without a GPU, say so.

    Each line is printed as soon as it is known, and the file is written after each stage. Exit status 1 if a check or a
    stage fails.
    """
    import torch

    if not torch.cuda.is_available():
        typer.echo("nothing to measure: there is no GPU that torch can use")
        return
    try:
        from benchmarks.device.run import run_device_bench
    except ModuleNotFoundError as error:
        complain(f"{error}: pip install 'paged-backend[triton]'")
        raise typer.Exit(1) from error

    def save(report: Report) -> None:
        if json is not None:
            json.write_text(json_module.dumps(report.as_data(), indent=1), encoding="utf-8")

    report = run_device_bench(seconds, typer.echo, save)
    failed = len(report.checks_failed)
    typer.echo(f"\n{report.checks_passed} kernel checks passed, {failed} failed, {len(report.errors)} errors")
    if report.failed:
        raise typer.Exit(1)


def kernels(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; may be repeated. Default: sm_80, sm_90, sm_100."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few configurations instead of all.")] = False,
    json: _Json = None,
) -> None:
    """Compile every Triton kernel ahead of time, without a GPU: registers, shared memory, spills.

    Exit status 1 if one spills or exceeds the target's shared memory.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    try:
        from paged_backend.kernels.triton import aot
    except ModuleNotFoundError as error:
        complain(f"{error}: pip install 'paged-backend[triton]'")
        raise typer.Exit(1) from error
    names = target or ["sm_80", "sm_90", "sm_100"]
    unknown = [name for name in names if name not in aot.TARGETS]
    if unknown:
        raise typer.BadParameter(f"unknown target {unknown[0]!r}; known ones: {', '.join(aot.TARGETS)}")
    cases = list(aot.quick_cases() if quick else aot.all_cases())
    compiled = list(aot.compile_cases(cases, names))
    typer.echo(aligned(_rows(compiled)))
    bad = [c for c in compiled if not c.fits]
    most = max(c.shared for c in compiled)
    typer.echo(f"{len(compiled)} compiled, {len(bad)} that spill or do not fit, at most {most} bytes shared")
    if json is not None:
        json.write_text(json_module.dumps([asdict(c) for c in compiled], indent=1), encoding="utf-8")
    if bad:
        raise typer.Exit(1)


def _rows(compiled: Sequence[Any]) -> list[list[str]]:
    rows = [["case", "kernel", "target", "warps", "registers", "shared", "spills", ""]]
    for c in compiled:
        numbers = [str(n) for n in (c.warps, c.registers, c.shared, c.spills)]
        rows.append([c.case, c.kernel, c.target, *numbers, "" if c.fits else "does not fit"])
    return rows
