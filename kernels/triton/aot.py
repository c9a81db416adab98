"""Ahead-of-time compilation of every kernel and configuration, which needs no device, and what the compiler
says of it.

The launches are those of ``Launcher``: it is run on tensors without memory, and what it would launch is
compiled. So the table cannot drift from what runs. NVIDIA: registers and spills as ptxas reports them, shared
memory as Triton allocates it. AMD: the same from the notes in the assembly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import CacheSpec, LayerCache
from paged_backend.kernels.tensor import tensor_dtype
from paged_backend.kernels.triton import quantize
from paged_backend.kernels.triton.launch import AttentionPlan, Launcher
from paged_backend.kernels.triton.penalties import Penalties

_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int8: "i8", torch.int16: "i16", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for. shared_limit: bytes of shared memory that one program may have there."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 163 << 10),
        Target("sm_86", "cuda", 86, 32, 99 << 10),
        Target("sm_89", "cuda", 89, 32, 99 << 10),
        Target("sm_90", "cuda", 90, 32, 227 << 10),
        Target("sm_100", "cuda", 100, 32, 227 << 10),
        Target("sm_120", "cuda", 120, 32, 99 << 10),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10),
    )
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers: per thread. shared, spills: bytes per program, bytes per thread (stores and loads)."""

    case: str
    kernel: str
    target: str
    warps: int
    registers: int
    shared: int
    spills: int

    @property
    def fits(self) -> bool:
        """Whether nothing spills and shared memory is within the target's limit."""
        return self.spills == 0 and self.shared <= TARGETS[self.target].shared_limit


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with its arguments, recorded instead of run."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, int]


class Recorder(Launcher):
    """Collects what would be launched on a device of this capability with 132 processors."""

    def __init__(self, capability: int) -> None:
        super().__init__(False, capability, 132)
        self.launches: list[Launch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
        self.launches.append(Launch(kernel, args, options))


def compile_launch(launch: Launch, target: Target, case: str) -> Compiled:
    """Compile one recorded launch. Raises what the compiler raises."""
    source = _source(launch)
    compiled = triton.compile(
        source, GPUTarget(target.backend, target.arch, target.warp_size), launch.options
    )
    if target.backend == "cuda":
        registers, spills = _ptxas(compiled.asm["ptx"], target)
    else:
        registers, spills = _amd_notes(compiled.asm["amdgcn"])
    name = launch.kernel.fn.__name__
    return Compiled(
        case,
        name,
        target.name,
        launch.options["num_warps"],
        registers,
        compiled.metadata.shared,
        spills,
    )


def _source(launch: Launch) -> ASTSource:
    """Types, constants and alignments as the runtime would derive them from the arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialised and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + _NAMES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if specialised and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _ptxas(ptx: str, target: Target) -> tuple[int, int]:
    """(registers, bytes of spill stores and loads), by the assembler that Triton brings, called as Triton calls
    it."""
    from triton.backends.nvidia.compiler import get_ptxas

    suffix = "a" if int(target.arch) >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(int(target.arch)).path, "-v", "--regAllocOptLevel=2", f"--gpu-name=sm_{target.arch}{suffix}",
            str(source), "-o", str(source.with_suffix(".o")),
        ]  # fmt: skip
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if registers is None or not spills:
        raise RuntimeError(f"ptxas did not report registers and spills:\n{log}")
    return int(registers[1]), sum(map(int, spills))


def _amd_notes(assembly: str) -> tuple[int, int]:
    def note(name: str) -> int:
        return sum(int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", assembly))

    # a spilled register is 4 bytes
    return note("vgpr_count"), 4 * (note("vgpr_spill_count") + note("sgpr_spill_count"))


# --- what is compiled ----------------------------------------------------------------------------------------------

Case = tuple[str, Callable[[Launcher], object]]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _cache(blocks: int, groups: int, dim: int, dtype: torch.dtype) -> LayerCache:
    name = str(dtype).removeprefix("torch.")
    parts = CacheSpec(1, groups, dim, 16, name).parts
    return LayerCache(*(_empty(blocks, *part.shape, dtype=tensor_dtype(part.dtype)) for part in parts))


def _attention(
    dtype: torch.dtype, kv: torch.dtype, dim: int, group: int, **options: Any
) -> Callable[[Launcher], object]:
    def run(launcher: Launcher) -> object:
        groups, tokens = 4, 64
        inputs = AttentionInputs(
            _empty(9, dtype=torch.int32), _empty(8, dtype=torch.int32), _empty(8, 64, dtype=torch.int32),
            _empty(tokens, dtype=torch.int64),
        )  # fmt: skip
        cache = _cache(64, groups, dim, kv)
        sinks = _empty(groups * group) if options.get("sinks") else None
        q = _empty(tokens, groups * group, dim, dtype=dtype)
        rest = (q, cache, 0.1, options.get("window"), options.get("softcap"), sinks)
        launcher.attention(AttentionPlan(inputs, (1,), 300), *rest)  # one segment
        return launcher.attention(AttentionPlan(inputs, (1, tokens), 1000), *rest)  # both classes of tiles

    return run


def attention_cases(dims: Sequence[int], groups: Sequence[int] = (1, 4, 8)) -> Iterator[Case]:
    """Attention of every head size, dtype and variant."""
    half, wide, brain = torch.float16, torch.float32, torch.bfloat16
    for dim in dims:
        for group in groups:
            yield f"attention bf16 D{dim} group {group}", _attention(brain, brain, dim, group)
        yield f"attention fp16 D{dim} group 4", _attention(half, half, dim, 4)
        yield f"attention fp32 D{dim} group 4", _attention(wide, wide, dim, 4)
        yield f"attention fp32, bf16 KV D{dim} group 4", _attention(wide, brain, dim, 4)
        for dtype in (brain, half, wide):
            yield f"attention {_NAMES[dtype]}, int8 KV D{dim} group 4", _attention(dtype, torch.int8, dim, 4)
        everything = {"window": 100, "softcap": 30.0, "sinks": True}
        yield (
            f"attention bf16 D{dim} group 4, window, soft cap, sinks",
            _attention(brain, brain, dim, 4, **everything),
        )


def other_cases() -> Iterator[Case]:
    """Everything but attention, in the shapes of Llama-3 8B and 70B and of the demo model."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = _NAMES[dtype]
        for d in (576, 4096, 8192, 16384):
            x, weight = _empty(8, d, dtype=dtype), _empty(d)
            yield f"rms_norm {name} {d}", lambda at, x=x, w=weight: at.rms_norm(x, None, w, 1e-5)
            yield f"add_rms_norm {name} {d}", lambda at, x=x, w=weight: at.rms_norm(x, x, w, 1e-5)
        for activation in ("silu", "gelu", "gelu_tanh"):
            x = _empty(8, 2 * 14336, dtype=dtype)
            yield f"{activation}_and_mul {name}", lambda at, x=x, a=activation: at.act_and_mul(x, a)
        for heads, groups, dim, half in ((32, 8, 128, 64), (9, 3, 64, 32), (16, 8, 256, 64), (8, 4, 80, 16)):
            for kv in (dtype, torch.int8):
                yield (
                    f"rotary {name}, {_NAMES[kv]} KV H{heads} G{groups} D{dim}",
                    _rotary(dtype, heads, groups, dim, half, kv),
                )
        for bits in (8, 4):
            for rows in (8, 64, 256):
                for bias in (False, True):
                    yield (
                        f"int{bits} matmul {name} {rows} rows{', bias' * bias}",
                        _matmul(dtype, bits, rows, bias),
                    )
        cache = _cache(9, 8, 128, dtype)
        yield f"copy_blocks {name}", lambda at, c=cache: at.copy_blocks([c], [(1, 2)])
    one, count = _empty(8), _empty(8, dtype=torch.int32)
    for v in (128256, 49152):
        logits = _empty(8, v)
        yield f"penalties on {v}", _penalties(v)
        yield (
            f"sample of {v}",
            lambda at, x=logits: at.sample(x, one, count, one, one, _empty(8, dtype=torch.float64)),
        )


def _penalties(v: int) -> Callable[[Launcher], object]:
    def run(launcher: Launcher) -> object:
        whole, half, double = (_empty(8, dtype=t) for t in (torch.int32, torch.float32, torch.float64))
        table = _empty(8, 64, dtype=torch.int32)
        by = Penalties(table, whole, 1000, whole, whole, half, double, double)
        return launcher.penalise(_empty(8, v), _empty(9, 16, dtype=torch.int64), by)

    return run


def _rotary(
    dtype: torch.dtype, heads: int, groups: int, dim: int, half: int, kv: torch.dtype
) -> Callable[[Launcher], object]:
    def run(launcher: Launcher) -> object:
        qkv = _empty(8, heads + 2 * groups, dim, dtype=dtype)
        cache = _cache(9, groups, dim, kv)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + groups], qkv[:, heads + groups :]
        angles, slots = _empty(8, half), _empty(8, dtype=torch.int64)
        return launcher.rotary_and_cache(q, k, v, angles, angles, cache, slots)

    return run


def _matmul(dtype: torch.dtype, bits: int, rows: int, bias: bool) -> Callable[[Launcher], object]:
    def run(launcher: Launcher) -> object:
        n, k = 4096, 4096
        weights = quantize.IntWeights(8, k, _empty(n, k, dtype=torch.int8), _empty(n), None)
        if bits == 4:
            scale = _empty(n, k // 32, dtype=torch.float16)
            weights = quantize.IntWeights(4, k, _empty(n, k // 2, dtype=torch.uint8), scale, scale)
        return launcher.int_matmul(_empty(rows, k, dtype=dtype), weights, _empty(n) if bias else None)

    return run


def quick_cases() -> Iterator[Case]:
    """One configuration of every kernel: those of Llama-3 8B in bfloat16."""
    brain = torch.bfloat16
    x, gates, weight = _empty(8, 4096, dtype=brain), _empty(8, 2 * 14336, dtype=brain), _empty(4096)
    yield "attention bf16 D128 group 4", _attention(brain, brain, 128, 4)
    yield "add_rms_norm bf16 4096", lambda at: at.rms_norm(x, x, weight, 1e-5)
    yield "silu_and_mul bf16", lambda at: at.act_and_mul(gates, "silu")
    yield "rotary bf16 H32 G8 D128", _rotary(brain, 32, 8, 128, 64, brain)
    yield "attention bf16, int8 KV D128 group 4", _attention(brain, torch.int8, 128, 4)
    yield "rotary bf16, int8 KV H32 G8 D128", _rotary(brain, 32, 8, 128, 64, torch.int8)
    yield "int8 matmul bf16 8 rows", _matmul(brain, 8, 8, False)
    yield "int4 matmul bf16 8 rows", _matmul(brain, 4, 8, False)
    cache = _cache(9, 8, 128, brain)
    yield "copy_blocks bf16", lambda at: at.copy_blocks([cache], [(1, 2)])
    logits, one, count = _empty(8, 128256), _empty(8), _empty(8, dtype=torch.int32)
    noise = _empty(8, dtype=torch.float64)
    yield "penalties on 128256", _penalties(128256)
    yield "sample of 128256", lambda at: at.sample(logits, one, count, one, one, noise)


def all_cases() -> Iterator[Case]:
    """Every kernel in every configuration."""
    yield from attention_cases((32, 64, 80, 96, 128, 256))
    yield from other_cases()


def compile_cases(cases: Sequence[Case], targets: Sequence[str]) -> Iterator[Compiled]:
    """Compile every launch of ``cases`` for every target, once where several cases launch the same."""
    seen: set[str] = set()
    for name in targets:
        target = TARGETS[name]
        for case, run in cases:
            recorder = Recorder(target.arch if isinstance(target.arch, int) else 0)
            run(recorder)
            for launch in recorder.launches:
                key = f"{name} {_source(launch).hash()} {launch.options}"
                if key not in seen:
                    seen.add(key)
                    yield compile_launch(launch, target, case)
