"""CpuKernels: the contract on top of the C library, called through ctypes with plain pointers.

A call costs a few microseconds besides the work: argument types are declared once, and arrays are looked at before
their addresses are taken (see ``check``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paged_backend.kernels.array import BFLOAT16, Array, address, float32
from paged_backend.kernels.base import AttentionInputs, Kernels, PackedLinear
from paged_backend.kernels.cpu import check
from paged_backend.kernels.cpu.arena import Arena
from paged_backend.kernels.cpu.blocks import BlockLinear, JoinedLinear, format_of, pack_blocks
from paged_backend.kernels.cpu.build import KernelBuildError, build
from paged_backend.kernels.cpu.cores import default_threads, usable_cores
from paged_backend.kernels.cpu.lowering import AroundLinear, Lowered, runs
from paged_backend.kernels.cpu.targets import WITHOUT_MATRIX_UNIT
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.weights import GGMLBlocks, Weight, rows, to_dense

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pb_linear": (None, (_P,) * 4 + (_I,) * 6),
    "pb_linear_bytes": (_I, (_I,) * 3),
    "pb_padded_outputs": (_I, (_I,)),
    "pb_pack_linear": (None, (_P, _P) + (_I,) * 7),
    "pb_pack_int": (None, (_P, _P) + (_I,) * 8),
    "pb_expand_gguf": (_I, (_I, _P, _I, _P, _I, _I)),
    "pb_block_row_bytes": (_I, (_I,) * 2),
    "pb_linear_blocks_bytes": (_I, (_I,) * 3),
    "pb_pack_blocks": (None, (_P, _P) + (_I,) * 5),
    "pb_linear_blocks": (None, (_P,) * 4 + (_I,) * 6),
    "pb_embedding_blocks": (_I, (_P,) * 3 + (_I,) * 4),
    "pb_usable": (_I, ()),
    "pb_bf16_products": (_I, ()),
    "pb_bf16_exact": (_I, (_P, _I)),
    "pb_embedding": (_I, (_P,) * 3 + (_I,) * 4),
    "pb_rms_norm": (None, (_P,) * 4 + (_I, _I, _D, _I)),
    "pb_softcap": (None, (_P, _I, _D, _I)),
    "pb_act_and_mul": (None, (_P, _P) + (_I,) * 4),
    "pb_rotary_and_cache": (_I, (_P,) * 10 + (_I,) * 12),
    "pb_copy_blocks": (None, (_P, _P, _I, _I)),
    "pb_plan_attention": (_I, (_P, _I, _P)),
    "pb_attention": (None, (_P,) * 11 + (_I,) * 9 + (_D, _D, _I, _I)),
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
    """Weights in the library's panels (bytes) and the bias float32, padded to whole panels (or None)."""

    __slots__ = ("bias", "bias_pointer", "code", "dtype", "in_features", "out_features", "pointer", "weights")

    def __init__(self, weights: Array, bias: Array | None, shape: tuple[int, int], dtype: str) -> None:
        self.weights, self.bias, self.dtype = weights, bias, dtype
        self.out_features, self.in_features = shape
        self.code = _DTYPES[dtype]
        self.pointer = weights.ctypes.data
        self.bias_pointer = bias.ctypes.data if bias is not None else None

    def nbytes(self) -> int:
        return self.weights.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work items of a step: ``tiles`` int32 [n, 3] (sequence, first query, queries). ``inputs`` keeps arrays alive."""

    inputs: AttentionInputs
    tiles: Array
    sizes: check.StepSizes
    pointers: tuple[int, int, int, int]


class CpuKernels(Kernels):
    """C kernels for this machine's instruction set.

    threads: None takes ``default_threads``; never more than cores. matmul_precision: of activations that are multiplied
    with bf16 weights, in torch's words: on a matrix unit (AMX) ``highest`` is fp32 (three bf16 numbers for each),
    ``high`` 16 bits (two), ``medium`` bf16, which vector units may have as well (AVX-512 BF16). Those multiplied with
    GGML's blocks: 16 bits and a scale per 256, with ``medium`` 8 and a scale per 32 where bytes can be multiplied
    (AVX2, VNNI, ARM's dot product). Elsewhere all is as precise as ``highest``.
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
        self._bits = 8 if matmul_precision == "medium" else 16
        self._lib = load_library(library or build())
        if not self._lib.pb_usable() and library is None:  # pb_usable also asks for the registers
            self._lib = load_library(build(WITHOUT_MATRIX_UNIT))
        self._arena = Arena()
        self.threads = min(threads or default_threads(), usable_cores())

    def _pack(self, weights: Sequence[Weight], bias: Array | None, dtype: str) -> PackedLinear:
        if dtype != "auto" and dtype not in _DTYPES:
            raise ValueError(f"dtype must be auto or one of {', '.join(_DTYPES)}, got {dtype!r}")
        if dtype != "auto":
            return self._pack_dense(weights, bias, dtype)
        parts: list[PackedLinear] = []
        first = 0
        for kind, run in runs(weights, partial(format_of, self._lib)):
            stop = first + sum(len(part.weight) for part in run)
            of_part = None if bias is None else bias[first:stop]
            parts.append(self._pack_run(kind, run, of_part))
            first = stop
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def _pack_run(self, kind: int | None, run: Sequence[Lowered], bias: Array | None) -> PackedLinear:
        """Weights of one format, whose inputs and outputs are treated alike."""
        same: list[Any] = [part.weight for part in run]
        order, multiplied = run[0].order, [part.scales for part in run if part.scales is not None]
        inner_bias = None if multiplied else bias
        if kind is None:
            inner: PackedLinear = self._pack_dense(same, inner_bias, "auto")
        else:
            inner = pack_blocks(self._lib, same, inner_bias, self._arena, self.threads)
        if order is None and not multiplied:
            return inner
        scales = np.concatenate(multiplied) if multiplied else None
        return AroundLinear(inner, order, scales, bias if multiplied else None)

    def _pack_dense(self, weights: Sequence[Weight], bias: Array | None, dtype: str) -> CpuLinear:
        if dtype == "auto":
            dtype = "bfloat16" if all(map(self._is_bf16, weights)) else "float32"
        n, k = sum(len(w) for w in weights), weights[0].shape[1]
        packed = self._arena.zeros(self._lib.pb_linear_bytes(n, k, _DTYPES[dtype]))
        if bias is not None:
            bias = np.pad(bias, (0, self._lib.pb_padded_outputs(n) - n))
        first = 0
        for weight in weights:
            self._put(packed.ctypes.data, weight, n, first, _DTYPES[dtype])
            first += len(weight)
        return CpuLinear(packed, bias, (n, k), dtype)

    def _is_bf16(self, weight: Weight) -> bool:
        """Whether every value is a bf16 number."""
        if isinstance(weight, GGMLBlocks):
            return False  # products of codes and scales
        if isinstance(weight, np.ndarray) and weight.dtype == BFLOAT16:
            return True
        return all(self._lib.pb_bf16_exact(address(part), part.size) for _, part in self._row_chunks(weight))

    def _put(self, packed: int, weight: Weight, n: int, first: int, code: int) -> None:
        """Put ``weight`` into the packed matrix of n outputs, as those from ``first`` on."""
        k = weight.shape[1]
        for row, part in self._row_chunks(weight):
            source, rows, at = address(part), len(part), first + row
            bf16 = part.dtype == BFLOAT16
            if code >= _DTYPES["int8"]:
                self._lib.pb_pack_int(packed, source, n, at, rows, k, k, bf16, code, self.threads)
            else:
                self._lib.pb_pack_linear(packed, source, at, rows, k, k, bf16, code, self.threads)

    def linear(self, x: Array, weight: PackedLinear) -> Array:
        x = check.contiguous("x", x)
        if type(weight) is JoinedLinear:
            return np.concatenate([self.linear(x, part) for part in weight.parts], axis=1)
        if type(weight) is AroundLinear:
            return weight.finish(self.linear(weight.inputs(x), weight.inner))
        packed = _own(weight)
        shape = x.shape
        if len(shape) != 2 or shape[1] != packed.in_features:
            raise ValueError(
                f"x {shape} has {shape[-1]} features, the weights take [T, {packed.in_features}]"
            )
        rows = shape[0]
        out = np.empty((rows, packed.out_features), np.float32)
        if isinstance(packed, BlockLinear):
            self._lib.pb_linear_blocks(
                address(x), packed.pointer, packed.bias_pointer, address(out),
                rows, packed.out_features, packed.in_features, packed.format_id, self._bits, self.threads,
            )  # fmt: skip
            return out
        self._lib.pb_linear(
            address(x), packed.pointer, packed.bias_pointer, address(out),
            rows, packed.out_features, packed.in_features, packed.code, self._parts, self.threads,
        )  # fmt: skip
        return out

    def logits(self, x: Array, head: PackedLinear, softcap: float | None = None) -> Array:
        scores = self.linear(x, head)
        if softcap is not None:
            self._lib.pb_softcap(address(scores), scores.size, softcap, self.threads)
        return scores

    def embedding(self, ids: Array, table: PackedLinear) -> Array:
        if type(table) is AroundLinear:
            return table.finish_rows(self.embedding(ids, table.inner), ids)
        packed = _own(table)
        pointer, count = check.whole_numbers("ids", ids), ids.size
        out = np.empty((count, packed.in_features), np.float32)
        shape = count, packed.out_features, packed.in_features
        if isinstance(packed, BlockLinear):
            bad = self._lib.pb_embedding_blocks(
                pointer, packed.pointer, address(out), *shape, packed.format_id
            )
        else:
            bad = self._lib.pb_embedding(pointer, packed.pointer, address(out), *shape, packed.code)
        if bad >= 0:
            raise IndexError(
                f"token id {int(ids.flat[bad])} is outside the vocabulary of {packed.out_features}"
            )
        return out

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        x = check.contiguous("x", x)
        d = x.shape[-1]
        multiplier = check.multiplier("weight", weight, d)
        out = np.empty_like(x)
        self._lib.pb_rms_norm(address(x), None, multiplier, address(out), x.size // d, d, eps, self.threads)
        return out

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Array:
        x = check.contiguous("x", x)
        changed = check.changed("residual", residual)
        if x.ndim != 2 or residual.shape != x.shape:
            raise ValueError(f"x {x.shape} and residual {residual.shape} must be the same [T, D]")
        rows, d = x.shape
        multiplier = check.multiplier("weight", weight, d)
        out = np.empty((rows, d), np.float32)
        self._lib.pb_rms_norm(address(x), changed, multiplier, address(out), rows, d, eps, self.threads)
        return out

    def rotary_and_cache(
        self,
        q: Array,
        k: Array,
        v: Array,
        cos: Array,
        sin: Array,
        cache: LayerCache,
        slot_mapping: Array,
    ) -> None:
        layout = check.cache_layout(cache)
        tokens, heads, d = check.of_heads("q", q)
        kept = (tokens, layout.heads, layout.d)
        if check.of_heads("k", k) != kept or check.of_heads("v", v) != kept or d != layout.d:
            raise ValueError(
                f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together or a cache of "
                f"{layout.heads} heads of {layout.d}"
            )
        cosines, sines = check.floats("cos", cos), check.floats("sin", sin)
        slots = check.whole_numbers("slot_mapping", slot_mapping)
        angles = cos.shape
        half = angles[-1]
        if angles != (tokens, half) or sin.shape != angles or 2 * half > d or slot_mapping.shape != (tokens,):
            raise ValueError(
                f"of {tokens} tokens and heads of {d}, cos {angles} and sin {sin.shape} are [T, R/2] and "
                f"slot_mapping {slot_mapping.shape} is [T]"
            )
        q_stride = check.token_stride("q", q, heads, d)
        k_stride = check.token_stride("k", k, layout.heads, d)
        v_stride = check.token_stride("v", v, layout.heads, d)
        check.writable("q", q)
        check.writable("k", k)
        bad = self._lib.pb_rotary_and_cache(
            address(q), address(k), address(v), cosines, sines,
            layout.key, layout.value, layout.key_scale, layout.value_scale, slots,
            tokens, heads, layout.heads, d, half, layout.size, layout.blocks,
            q_stride, k_stride, v_stride, self.threads, layout.itemsize,
        )  # fmt: skip
        if bad >= 0:
            raise IndexError(
                f"slot {int(slot_mapping[bad])} is outside of the cache of {layout.blocks} blocks of {layout.size}"
            )

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        sizes = check.step_sizes(inputs)
        start, lens, table = inputs.query_start_loc, inputs.seq_lens, inputs.block_table
        sequences = lens.shape[0]
        count = self._lib.pb_plan_attention(address(start), sequences, None)
        tiles = np.empty((count, 3), np.int32)
        self._lib.pb_plan_attention(address(start), sequences, address(tiles))
        return AttentionPlan(
            inputs, tiles, sizes, (address(start), address(lens), address(table), address(tiles))
        )

    def paged_attention(
        self,
        plan: AttentionPlan,
        q: Array,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        layout, sizes = check.cache_layout(cache), plan.sizes
        sizes.fit(layout)
        tokens, heads, d = check.of_heads("q", q)
        if tokens != sizes.tokens or d != layout.d or heads % layout.heads:
            raise ValueError(
                f"q {q.shape} does not fit a step of {sizes.tokens} tokens and a cache of {layout.heads} heads "
                f"of {layout.d}"
            )
        stride = check.token_stride("q", q, heads, d)
        out = np.empty((tokens, heads * d), np.float32)
        self._lib.pb_attention(
            address(q), layout.key, layout.value, layout.key_scale, layout.value_scale,
            check.multiplier("sinks", sinks, heads) if sinks is not None else None, address(out), *plan.pointers,
            len(plan.tiles), sizes.longest, sizes.width, stride,
            heads, layout.heads, d, layout.size, window or 0, scale, softcap or 0.0, self.threads,
            layout.itemsize,
        )  # fmt: skip
        return out

    def act_and_mul(self, x: Array, activation: str) -> Array:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        x = check.contiguous("x", x)
        if x.ndim != 2 or x.shape[1] % 2:
            raise ValueError(f"x must be [T, 2I], got {x.shape}")
        rows, d = x.shape[0], x.shape[1] // 2
        out = np.empty((rows, d), np.float32)
        self._lib.pb_act_and_mul(address(x), address(out), rows, d, _ACTIVATIONS[activation], self.threads)
        return out

    def to_dense(self, weight: Weight) -> Array:
        if not isinstance(weight, GGMLBlocks):
            return to_dense(weight)
        raw, out = np.ascontiguousarray(weight.raw), np.empty(weight.shape, np.float32)
        known = self._lib.pb_expand_gguf(
            weight.type.id, address(raw), raw.nbytes, address(out), out.size, self.threads
        )
        return out if known > 0 else weight.to_dense()

    def _row_chunks(self, weight: Weight) -> Iterator[tuple[int, Array]]:
        """(first row, contiguous rows as float32 or bfloat16) of a matrix, a few megabytes at a time."""
        step = max(1, _CHUNK_FLOATS // max(1, weight.shape[1]))
        for row in range(0, len(weight), step):
            part = self.to_dense(rows(weight, row, min(row + step, len(weight))))
            yield row, np.ascontiguousarray(part if part.dtype == BFLOAT16 else float32(part))

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        ids = np.array(pairs, np.int64)
        layouts = [check.cache_layout(cache) for cache in caches]
        fewest = min((layout.blocks for layout in layouts), default=0)
        if ids.ndim != 2 or ids.shape[1] != 2 or ids.min() < 0 or ids.max() >= fewest:
            raise IndexError(f"blocks to copy are (source, destination) below {fewest}, got {list(pairs)}")
        for layout in layouts:
            for pointer, size in layout.parts:
                self._lib.pb_copy_blocks(pointer, ids.ctypes.data, len(ids), size)

    def empty_cache(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str = "float32",
    ) -> list[LayerCache]:
        caches = super().empty_cache(num_layers, num_blocks, num_kv_heads, head_dim, block_size, dtype)
        return [check.CheckedCache(*cache.parts, layout=check.cache_layout(cache)) for cache in caches]


def _own(weight: PackedLinear) -> CpuLinear | BlockLinear:
    if not isinstance(weight, (CpuLinear, BlockLinear)):
        raise TypeError(f"weights were packed by another backend ({type(weight).__name__}); pack them here")
    return weight
