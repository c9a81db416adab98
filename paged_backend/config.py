"""EngineConfig: everything that shapes an engine, validated once, with messages that name the fix."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. Two callers with equal configs share one engine (see ``get_engine``).

    model: a folder with safetensors, a .gguf file, a hub id, or ``demo``.
    tokenizer: folder or hub id of the tokenizer; None takes the model's own.
    device: ``cpu``, or ``cuda`` for the first GPU (``pip install 'paged-backend[triton]'``).
    dtype: how weights are stored; math is fp32 on the CPU. ``auto`` keeps what the file has, blocks of GGUF formats
        among it, where the C kernels run; other kernels keep what they compute in. On a GPU it is also what
        activations are kept in, ``auto`` is ``bfloat16``, and ``float16`` is possible.
    kernels: ``auto``, ``c`` (fails if they cannot be built), ``reference`` (plain numpy) or ``triton`` (which ``auto``
        is on a GPU).
    quantization: None for the checkpoint's own precision.
    matmul_precision: of activations on a CPU, in torch's words. Multiplied with bfloat16 weights: ``highest`` fp32,
        ``high`` 16 bits, ``medium`` bfloat16, each faster than the one before on a matrix unit (AMX); vector units with
        bfloat16 (AVX-512 BF16) are faster with ``medium``. Multiplied with blocks of a GGUF file: 16 bits, ``medium``
        8 bits in groups where bytes can be multiplied (AVX2, VNNI, ARM's dot product). What a CPU has nothing faster
        for is as ``highest``.
    kv_cache_dtype: how keys and values are kept: ``float32``, or ``bfloat16``, which takes half the memory and is
        read in half the time by long contexts; rounded to nearest even when written, math stays fp32. ``int8``
        takes half of bfloat16's memory: codes of 8 bits with a scale per token and head. ``auto`` is float32, but
        bfloat16 with ``quantization``, which is less precise than that already; on a GPU it is what activations are.
    max_model_len: longest prompt + output in tokens; None takes the model's context.
    block_size: tokens per KV block, a power of two (16 keeps waste below 4 %).
    num_blocks: KV pool limit in blocks; None sizes it by ``kv_cache_memory``.
    kv_cache_memory: pool limit in bytes; None takes a quarter of the memory that the process may use, or most of
        what the weights leave free on a GPU. Memory is committed only when a block is first used.
    kv_cache_idle_timeout: seconds without work after which an engine gives back the memory of all KV blocks, those of
        cached prefixes included; 0 keeps them. None takes 300 (hosted APIs keep a prompt for five minutes, too), and
        0 on a GPU and outside of Linux, where the pool keeps its memory.
    max_num_seqs: most requests in one step. max_num_batched_tokens: token budget of one step; None takes 512, on a GPU
        2048, which such a card needs to be busy.
    enable_prefix_caching: share KV of equal prompt prefixes.
    threads: compute threads; None takes ``OMP_NUM_THREADS``, else one for each physical core.
    seed: makes unseeded requests reproducible; None draws fresh entropy.
    trust_remote_code: never honoured here (code from a checkpoint is not run); True raises.
    """

    model: str
    tokenizer: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    matmul_precision: str = "highest"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_idle_timeout: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    threads: int | None = None
    seed: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)) or not str(self.model):
            raise ValueError(f"model must be a folder, a .gguf file, a hub id or 'demo', got {self.model!r}")
        object.__setattr__(self, "model", str(self.model))
        _one_of("device", self.device, ("cpu", "cuda"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("kernels", self.kernels, ("auto", "c", "reference", "triton"))
        if self.device != "cpu" and self.kernels not in ("auto", "triton"):
            raise ValueError(
                f"kernels={self.kernels!r} run on the CPU only: leave kernels at 'auto' on {self.device}"
            )
        if not self.through_triton and "float16" in (self.dtype, self.kv_cache_dtype):
            raise ValueError("float16 needs device='cuda': the CPU kernels have float32 and bfloat16")
        _one_of("quantization", self.quantization, (None, "int8", "int4"))
        _one_of("matmul_precision", self.matmul_precision, ("highest", "high", "medium"))
        if self.matmul_precision != "highest" and (
            self.dtype not in ("auto", "bfloat16")
            or self.quantization
            or self.through_triton
            or self.kernels == "reference"
        ):
            raise ValueError(
                f"matmul_precision={self.matmul_precision!r} is about products with bfloat16 weights and GGUF blocks "
                "in the C kernels: leave dtype at 'auto' or 'bfloat16', and quantization, kernels and device alone"
            )
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "float32", "bfloat16", "float16", "int8"))
        for name in ("max_model_len", "num_blocks", "kv_cache_memory", "threads", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("block_size", "max_num_seqs"):
            _positive(name, getattr(self, name))
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError("num_blocks must be at least 2: block 0 is the null block and holds no tokens")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("give num_blocks or kv_cache_memory, not both")
        # decided here, so that who names the default and who leaves it out have equal configs
        object.__setattr__(self, "kv_cache_idle_timeout", self._decided_idle_timeout())
        object.__setattr__(self, "max_num_batched_tokens", self.token_budget)
        if self.token_budget < self.max_num_seqs:
            # every running request must be able to decode one token in each step
            object.__setattr__(self, "max_num_seqs", self.token_budget)
        if self.trust_remote_code:
            raise ValueError("trust_remote_code=True is not supported: code from a checkpoint is never run")

    @property
    def through_triton(self) -> bool:
        """Whether the Triton kernels are used: on a GPU, or if asked for."""
        return self.device != "cpu" or self.kernels == "triton"

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, decided."""
        return self.max_num_batched_tokens or (512 if self.device == "cpu" else 2048)

    @property
    def activation_dtype(self) -> str:
        """What activations are kept in: float32 on the CPU, and on a GPU ``dtype`` with ``auto`` decided."""
        if not self.through_triton:
            return "float32"
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def stored_kv_dtype(self) -> str:
        """``kv_cache_dtype`` with ``auto`` decided."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        if self.through_triton:
            return self.activation_dtype
        return "float32" if self.quantization is None else "bfloat16"

    def _decided_idle_timeout(self) -> float:
        value = self.kv_cache_idle_timeout
        keeps = self.through_triton or not sys.platform.startswith("linux")
        if value is None:
            return 0.0 if keeps else 300.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise ValueError(f"kv_cache_idle_timeout must be a number of seconds >= 0, got {value!r}")
        if value and keeps:
            raise ValueError(
                f"kv_cache_idle_timeout={value} needs the CPU kernels on Linux: elsewhere the KV pool keeps its "
                "memory; leave it out or set it to 0"
            )
        return float(value)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Build a config, naming the nearest option for a misspelt one."""
        import difflib

        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}"
                raise TypeError(f"unknown engine option {name!r}{hint}")
        return cls(model=model, **options)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
