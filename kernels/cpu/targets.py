"""Instruction sets that the C kernels are compiled for, and which of them a processor runs."""

from __future__ import annotations

import os
import platform

from paged_backend.errors import BackendUnavailableError

_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")

NATIVE = ("-march=native",) if _X86 else ("-mcpu=native",)

# for a machine whose operating system does not hand out the registers of the matrix unit that its CPU has
WITHOUT_MATRIX_UNIT = (*NATIVE, "-mno-amx-tile")

TARGETS: dict[str, tuple[str, ...]] = {
    "native": NATIVE,
    "avx2": _AVX2,
    "avx2-vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512-vnni": _AVX512_VNNI,
    "avx512-bf16": _AVX512_BF16,
    "amx": (*_AVX512_VNNI, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "portable": (),
}
"""Flags of what ``PAGED_BACKEND_TARGET`` may name: the machine's own instruction set, or one of x86-64. On ARM all is
portable."""

_BITS = {
    "avx2": 1,
    "avx2-vnni": 2,
    "avx512": 4,
    "avx512-vnni": 8,
    "amx": 16,
    "avx512-bf16": 32,
}  # those of processor.h

PREFERENCE = ("amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "portable")
"""The fastest first."""


class KernelBuildError(BackendUnavailableError):
    """The C kernels cannot be compiled or loaded here; the message says why and names the fix."""


def chosen_target() -> str | None:
    """What ``PAGED_BACKEND_TARGET`` names, None for no choice. Raises KernelBuildError for an unknown name."""
    target = os.environ.get("PAGED_BACKEND_TARGET")
    if target and target not in TARGETS:
        raise KernelBuildError(f"PAGED_BACKEND_TARGET={target!r} is none of {', '.join(TARGETS)}")
    return target or None


def runnable(instruction_sets: int) -> list[str]:
    """Targets that a processor runs, the fastest first. instruction_sets: what ``pb_instruction_sets`` has returned."""
    return [name for name in PREFERENCE if _BITS.get(name, 0) & instruction_sets == _BITS.get(name, 0)]
