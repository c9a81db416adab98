"""Choose the backend for this machine."""

from __future__ import annotations

import warnings

from paged_backend.errors import BackendUnavailableError, MissingExtraError, missing_extra
from paged_backend.kernels.base import Kernels


def select_kernels(
    name: str = "auto",
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    matmul_precision: str = "highest",
) -> Kernels:
    """``auto``: what suits the device; ``c``, ``reference`` or ``triton``: that one or an error.

    On the CPU ``auto`` is C if it can be built, else the numpy reference with a warning. threads: compute threads of
    the C kernels; None takes ``cores.default_threads``. dtype: of the activations of the Triton kernels; the others
    have float32. matmul_precision: see ``CpuKernels``; the other kernels have nothing faster and stay at ``highest``.
    Raises BackendUnavailableError naming the fix where the device, Triton or (for ``c``) a compiler is missing.
    """
    if device != "cpu" or name == "triton":
        if name not in ("auto", "triton"):
            raise ValueError(
                f"kernels={name!r} run on the CPU only: use auto or triton with device={device!r}"
            )
        return _triton_kernels(device, dtype)
    from paged_backend.kernels.reference import ReferenceKernels

    if name == "reference":
        return ReferenceKernels()
    if name not in ("auto", "c"):
        raise ValueError(f"kernels must be auto, c, reference or triton, got {name!r}")
    from paged_backend.kernels.cpu.backend import CpuKernels
    from paged_backend.kernels.cpu.build import KernelBuildError

    try:
        return CpuKernels(threads, matmul_precision=matmul_precision)
    except KernelBuildError as error:
        if name == "c":
            raise
        warnings.warn(f"using the slow numpy kernels: {error}", RuntimeWarning, stacklevel=2)
        return ReferenceKernels()


def _triton_kernels(device: str, dtype: str) -> Kernels:
    try:
        with missing_extra("triton", "a GPU"):
            import torch

            if device != "cpu" and not torch.cuda.is_available():
                built = (
                    ""
                    if torch.version.cuda or torch.version.hip
                    else " (this torch is built for the CPU only)"
                )
                raise BackendUnavailableError(
                    f"device={device!r} needs a GPU that torch can use, and there is none{built}: use "
                    "device='cpu', or install a torch built for your GPU and check that the driver is loaded"
                )
            from paged_backend.kernels.triton.backend import TritonKernels
    except MissingExtraError as error:
        raise BackendUnavailableError(str(error)) from error
    try:
        return TritonKernels(device, dtype)
    except RuntimeError as error:
        raise BackendUnavailableError(str(error)) from error
