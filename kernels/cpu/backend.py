"""CpuKernels: the contract on top of the C library, called through ctypes with plain pointers.

A call costs one or two microseconds besides the work: argument types are declared once, outputs are allocated by
torch, and nothing is checked that costs more than reading a shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.kernels.base import AttentionInputs, Kernels, LayerCache, PackedLinear
from paged_backend.kernels.cpu.arena import Arena
from paged_backend.kernels.cpu.build import WITHOUT_MATRIX_UNIT, KernelBuildError, build, usable_cores

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pb_linear": (None, (_P,) * 4 + (_I,) * 6),
    "pb_linear_bytes": (_I, (_I,) * 3),
    "pb_padded_outputs": (_I, (_I,)),
    "pb_pack_linear": (None, (_P, _P) + (_I,) * 7),
    "pb_pack_int": (None, (_P, _P) + (_I,) * 8),
    "pb_expand_gguf": (_I, (_I, _P, _I, _P, _I)),
    "pb_usable": (_I, ()),
    "pb_bf16_exact": (_I, (_P, _I)),
    "pb_embedding": (_I, (_P,) * 3 + (_I,) * 4),
    "pb_rms_norm": (None, (_P,) * 4 + (_I, _I, _D, _I)),
    "pb_act_and_mul": (None, (_P, _P) + (_I,) * 4),
    "pb_rotary_and_cache": (None, (_P,) * 8 + (_I,) * 11),
    "pb_copy_blocks": (None, (_P, _P, _I, _I)),
    "pb_plan_attention": (_I, (_P, _I, _P)),
    "pb_attention": (None, (_P,) * 9 + (_I,) * 9 + (_D, _D, _I, _I)),
}
_DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
_PARTS = {"highest": 3, "high": 2, "medium": 1}  # bf16 numbers that stand for an activation on a matrix unit
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_CHUNK_FLOATS = 1 << 22  # of a weight matrix converted at a time while packing


def load_library(path: Path) -> ctypes.CDLL:
    """The compiled library with its argument types declared. Calls release the GIL."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelBuildError(
            f"cannot load {path} ({error}); delete the file, it is compiled anew"
        ) from error
    return library


class CpuLinear(PackedLinear):
    """Weights in the library's panels (a byte tensor) and the bias padded to whole panels (or None)."""

    __slots__ = ("bias", "bias_pointer", "code", "dtype", "in_features", "out_features", "pointer", "weights")

    def __init__(self, weights: Tensor, bias: Tensor | None, shape: tuple[int, int], dtype: str) -> None:
        self.weights, self.bias, self.dtype = weights, bias, dtype
        self.out_features, self.in_features = shape
        self.code = _DTYPES[dtype]
        self.pointer = weights.data_ptr()
        self.bias_pointer = bias.data_ptr() if bias is not None else None

    def nbytes(self) -> int:
        return self.weights.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work items of a step: ``tiles`` int32 [n, 3] (sequence, first query, queries). ``inputs`` keeps arrays alive."""

    inputs: AttentionInputs
    tiles: np.ndarray
    longest: int
    pointers: tuple[int, int, int, int]


class CpuKernels(Kernels):
    """C kernels for this machine's instruction set.

    threads: None takes torch's number; never more than cores. matmul_precision: of activations that are multiplied
    with bf16 weights on a matrix unit (AMX), in torch's words: ``highest`` is fp32 (three bf16 numbers for each),
    ``high`` 16 bits (two), ``medium`` bf16. What is not computed there is as precise as ``highest``.
    """

    name = "c"

    def __init__(
        self,
        threads: int | None = None,
        library: Path | None = None,
        matmul_precision: str = "highest",
    ) -> None:
        if matmul_precision not in _PARTS:
            raise ValueError(f"matmul_precision must be one of {', '.join(_PARTS)}, got {matmul_precision!r}")
        self._parts = _PARTS[matmul_precision]
        self._lib = load_library(library or build())
        if not self._lib.pb_usable() and library is None:  # pb_usable also asks for the registers
            self._lib = load_library(build(WITHOUT_MATRIX_UNIT))
        self._arena = Arena()
        self.threads = min(threads or torch.get_num_threads(), usable_cores())

    def pack_linear(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, dtype: str = "auto"
    ) -> CpuLinear:
        if dtype != "auto" and dtype not in _DTYPES:
            raise ValueError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {dtype!r}")
        if not weights or any(w.dim() != 2 or w.shape[1] != weights[0].shape[1] for w in weights):
            raise ValueError("pack_linear needs matrices [N_i, K] that share K")
        if dtype == "auto":
            dtype = "bfloat16" if all(self._is_bf16(w) for w in weights) else "float32"
        n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
        packed = self._arena.zeros(self._lib.pb_linear_bytes(n, k, _DTYPES[dtype]))
        bias = None
        if biases is not None and any(b is not None for b in biases):
            bias = torch.zeros(self._lib.pb_padded_outputs(n))
        first = 0
        for i, weight in enumerate(weights):
            self._pack(packed, weight.detach(), n, first, _DTYPES[dtype])
            if bias is not None and biases is not None and biases[i] is not None:
                bias[first : first + weight.shape[0]] = biases[i]
            first += weight.shape[0]
        return CpuLinear(packed, bias, (n, k), dtype)

    def _is_bf16(self, weight: Tensor) -> bool:
        """Whether every value is a bf16 number."""
        if weight.dtype == torch.bfloat16:
            return True
        return all(self._lib.pb_bf16_exact(part.data_ptr(), part.numel()) for _, part in _row_chunks(weight))

    def _pack(self, packed: Tensor, weight: Tensor, n: int, first: int, code: int) -> None:
        """Put ``weight`` into the packed matrix of n outputs, as those from ``first`` on."""
        k = weight.shape[1]
        for row, part in _row_chunks(weight):
            from_bf16, rows = part.dtype == torch.bfloat16, part.shape[0]
            if code >= _DTYPES["int8"]:
                self._lib.pb_pack_int(
                    packed.data_ptr(),
                    part.data_ptr(),
                    n,
                    first + row,
                    rows,
                    k,
                    k,
                    from_bf16,
                    code,
                    self.threads,
                )
            else:
                self._lib.pb_pack_linear(
                    packed.data_ptr(), part.data_ptr(), first + row, rows, k, k, from_bf16, code, self.threads
                )

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        packed = _own(weight)
        if x.shape[-1] != packed.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, the weights take {packed.in_features}")
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, packed.out_features)
        self._lib.pb_linear(
            x.data_ptr(), packed.pointer, packed.bias_pointer, out.data_ptr(),
            rows, packed.out_features, packed.in_features, packed.code, self._parts, self.threads,
        )  # fmt: skip
        return out

    def embedding(self, ids: Tensor, table: PackedLinear) -> Tensor:
        packed = _own(table)
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], packed.in_features)
        bad = self._lib.pb_embedding(
            ids.data_ptr(), packed.pointer, out.data_ptr(),
            ids.shape[0], packed.out_features, packed.in_features, packed.code,
        )  # fmt: skip
        if bad >= 0:
            raise IndexError(f"token id {int(ids[bad])} is outside the vocabulary of {packed.out_features}")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        d = x.shape[-1]
        self._lib.pb_rms_norm(
            x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // d, d, eps, self.threads
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        if not residual.is_contiguous():
            raise ValueError("the residual is changed in place and must be contiguous")
        out = torch.empty_like(x)
        rows, d = x.shape
        self._lib.pb_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, d, eps, self.threads
        )
        return out

    def rotary_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        tokens, heads, d = q.shape
        self._lib.pb_rotary_and_cache(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cache.key.data_ptr(), cache.value.data_ptr(), slot_mapping.data_ptr(),
            tokens, heads, k.shape[1], d, cos.shape[1], cache.key.shape[3],
            _token_stride(q), _token_stride(k), _token_stride(v), self.threads, _is_bf16_cache(cache),
        )  # fmt: skip

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        start, lens, table = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
        sequences = lens.shape[0]
        count = self._lib.pb_plan_attention(start.data_ptr(), sequences, None)
        tiles = np.empty((count, 3), np.int32)
        self._lib.pb_plan_attention(start.data_ptr(), sequences, tiles.ctypes.data)
        longest = int(lens.max()) if sequences else 0
        return AttentionPlan(
            inputs, tiles, longest, (start.data_ptr(), lens.data_ptr(), table.data_ptr(), tiles.ctypes.data)
        )

    def paged_attention(
        self,
        plan: AttentionPlan,
        q: Tensor,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens, heads, d = q.shape
        out = torch.empty(tokens, heads * d)
        _, kv_heads, _, block_size = cache.key.shape
        self._lib.pb_attention(
            q.data_ptr(), cache.key.data_ptr(), cache.value.data_ptr(),
            sinks.data_ptr() if sinks is not None else None, out.data_ptr(), *plan.pointers,
            len(plan.tiles), plan.longest, plan.inputs.block_table.shape[1], _token_stride(q),
            heads, kv_heads, d, block_size, window or 0, scale, softcap or 0.0, self.threads,
            _is_bf16_cache(cache),
        )  # fmt: skip
        return out

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        x = x.contiguous()
        rows, d = x.shape[0], x.shape[1] // 2
        out = torch.empty(rows, d)
        self._lib.pb_act_and_mul(
            x.data_ptr(), out.data_ptr(), rows, d, _ACTIVATIONS[activation], self.threads
        )
        return out

    def expand_gguf(self, raw: np.ndarray, format_id: int, values: int) -> np.ndarray | None:
        raw = np.ascontiguousarray(raw)
        out = np.empty(values, np.float32)
        known = self._lib.pb_expand_gguf(
            format_id, raw.ctypes.data, raw.nbytes, out.ctypes.data, self.threads
        )
        return out if known else None

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        ids = np.array(pairs, np.int64)
        for cache in caches:
            for part in (cache.key, cache.value):
                self._lib.pb_copy_blocks(part.data_ptr(), ids.ctypes.data, len(ids), part[0].nbytes)


def _own(weight: PackedLinear) -> CpuLinear:
    if not isinstance(weight, CpuLinear):
        raise TypeError(f"weights were packed by another backend ({type(weight).__name__}); pack them here")
    return weight


def _is_bf16_cache(cache: LayerCache) -> bool:
    if cache.key.dtype is torch.float32:
        return False
    if cache.key.dtype is torch.bfloat16:
        return True
    raise TypeError(f"the KV cache must be float32 or bfloat16, got {cache.key.dtype}")


def _token_stride(x: Tensor) -> int:
    """Distance of tokens in a [T, heads, D] view whose last two dimensions are contiguous."""
    token, head, element = x.stride()
    if element != 1 or (head != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"heads must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    return token


def _row_chunks(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, contiguous rows as float32 or bfloat16) of a matrix, a few megabytes at a time."""
    step = max(1, _CHUNK_FLOATS // max(1, weight.shape[1]))
    dtype = weight.dtype if weight.dtype == torch.bfloat16 else torch.float32
    for row in range(0, weight.shape[0], step):
        yield row, weight[row : row + step].to(dtype).contiguous()
