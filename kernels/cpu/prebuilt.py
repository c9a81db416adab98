"""The libraries that a wheel brings: one for each instruction set. The processor decides which is loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

from paged_backend.kernels.cpu.targets import KernelBuildError, runnable

FOLDER = Path(__file__).parent / "prebuilt"
"""Holds a library per target, named after it. A checkout has none: there the kernels are compiled."""


def prebuilt(target: str | None) -> Path | None:
    """The library for ``target`` or, for None, the best that this processor runs; None if the package brings none.

    Raises KernelBuildError if the processor cannot run ``target``.
    """
    libraries = {path.stem: path for path in FOLDER.glob("*") if path.suffix in (".so", ".dylib", ".dll")}
    if not libraries or (target is not None and target not in libraries):
        return None
    # looked at with instructions that every processor has
    usable = runnable(ctypes.CDLL(str(libraries["portable"])).pb_instruction_sets())
    if target is None:
        return next(libraries[name] for name in usable if name in libraries)
    if target not in usable:
        raise KernelBuildError(
            f"this processor cannot run PAGED_BACKEND_TARGET={target}: it takes {', '.join(usable)}"
        )
    return libraries[target]
