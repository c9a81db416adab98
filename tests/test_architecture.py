"""Imports point downwards: what a newcomer reads in docs/architecture.md is what the files do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "benchmarks": "paged_backend.benchmarks",  # by that name only here: it is not shipped
    "paged_backend": "paged_backend",
    "adapters": "paged_backend.adapters",
    "kernels": "paged_backend.kernels",
}

FLOORS = """
    benchmarks
    __main__
    cli.app
    cli
    bench
    testing
    server.run
    server.routes
    server.wire
    server
    adapters.huggingface adapters.langchain adapters.llama_index
    adapters
    llm
    remote
    engine
    runner
    models.loading
    models.transformers
    models
    toolcalls
    text
    checkpoints
    batch
    sequence_slice
    cache sampling_params vllm_options
    constrain
    kernels.select
    kernels.cpu kernels.triton
    kernels
    logs memory_pressure token_ids tokenization
    notices config errors machine folders
    outputs neutral
"""
"""From the roof down; a name stands for a module or for a folder and what lies in it. Rooms of one floor do not
import each other."""


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
ROOMS = {
    f"paged_backend.{room}": floor for floor, line in enumerate(FLOORS.split("\n")) for room in line.split()
}


def imports(module: str) -> set[str]:
    """Modules of ours that ``module`` names in an import, wherever in the file and for whatever purpose."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            name = f"paged_backend.{name}" if name.startswith("benchmarks") else name
            known = name if name in MODULES else name.rpartition(".")[0]
            found |= {known} & MODULES.keys()
    return found - {"paged_backend"}  # its exports are loaded on first use


def room_of(module: str) -> str:
    while module not in ROOMS:
        assert "." in module, f"{module} has no floor"
        module = module.rpartition(".")[0]
    return module


def test_imports_point_downwards():
    upward = []
    for module in MODULES.keys() - {"paged_backend"}:
        here = room_of(module)
        for other in imports(module):
            there = room_of(other)
            if there != here and ROOMS[there] <= ROOMS[here]:
                upward.append(f"{module} -> {other}")
    assert not sorted(upward)


def test_no_files_import_each_other_in_a_circle():
    graph = {module: imports(module) - {module} for module in MODULES}
    while leaves := {module for module, others in graph.items() if not others}:
        graph = {module: others - leaves for module, others in graph.items() if module not in leaves}
    assert not graph, "in a circle, or above one"


def test_the_cache_and_the_scheduler_know_no_tensors():
    for module, path in MODULES.items():
        if module.startswith("paged_backend.cache") or module.endswith(
            ("engine.scheduler", "engine.admission")
        ):
            assert "import torch" not in path.read_text(encoding="utf-8"), module


LIGHT = (
    "paged_backend.checkpoints.gguf",
    "paged_backend.checkpoints.loading",
    "paged_backend.engine.engine",
    "paged_backend.engine.factory",
    "paged_backend.kernels.cpu.backend",
    "paged_backend.kernels.reference",
    "paged_backend.models.loading",
    "paged_backend.models.tensors",
    "paged_backend.runner.model_runner",
    "paged_backend.testing",
    "paged_backend.text.detokenizer",
)
"""Modules that import no torch, nor does what they import: among it scheduler, core, cache, sampler, decoder."""


def test_what_runs_on_the_cpu_imports_no_torch():
    banned = {"torch": None, "transformers": None}
    script = f"import sys, importlib; sys.modules.update({banned})\n"
    script += f"for name in {LIGHT}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
