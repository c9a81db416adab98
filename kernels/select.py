"""Choose the backend for this machine."""

from __future__ import annotations

import warnings

from paged_backend.kernels.base import Kernels


def select_kernels(name: str = "auto", threads: int | None = None) -> Kernels:
    """``auto``: C if it can be built, else the torch reference with a warning; ``c``: C or an error; ``reference``.

    threads: compute threads of the C kernels; None takes torch's number.
    """
    from paged_backend.kernels.reference import ReferenceKernels

    if name == "reference":
        return ReferenceKernels()
    if name not in ("auto", "c"):
        raise ValueError(f"kernels must be auto, c or reference, got {name!r}")
    from paged_backend.kernels.cpu.backend import CpuKernels
    from paged_backend.kernels.cpu.build import KernelBuildError

    try:
        return CpuKernels(threads)
    except KernelBuildError as error:
        if name == "c":
            raise
        warnings.warn(f"using the slow torch kernels: {error}", RuntimeWarning, stacklevel=2)
        return ReferenceKernels()
