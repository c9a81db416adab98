"""The kernel contract: few operations, one signature each, implemented by every backend.

Shapes: T tokens of the flat batch, S sequences, H query heads, G key/value heads (H is a multiple of G), D head
size, K and N the inputs and outputs of a linear. What a backend computes on is its own business (``DeviceArray``):
numpy arrays of float32 on the CPU, tensors on a GPU; ``to_device`` and ``to_host`` lead there and back. Every output
row depends on its own input row only and is reduced in one fixed order, so that a token's result does not depend on
what else is in the batch (on a GPU, Triton's backend keeps this for dense products only as far as cuBLAS does).

How keys and values are kept between steps: see ``kv_cache``. Math is float32 whatever they are kept as.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.kernels.array import DTYPES, Array, float32
from paged_backend.kernels.kv_cache import CacheSpec, LayerCache
from paged_backend.kernels.pages import reserve
from paged_backend.kernels.weights import Weight, is_weight, to_dense

DeviceArray = Any
"""What a backend computes on. Both kinds have shapes, slices, views by ``reshape``, and arithmetic in place."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where each sequence of the flat batch is. Prefill, chunk, decode and prefix hit are one case.

    query_start_loc: int32 [S+1], first token of each sequence in the flat batch, then T.
    seq_lens: int32 [S], context length including this step's tokens.
    block_table: int32 [S, B], block ids of each sequence, padded with 0 (the null block; also stands for
    blocks that a sliding window has passed).
    slot_mapping: int64 [T], ``block * block_size + offset`` where each token's K and V are written.
    """

    query_start_loc: DeviceArray
    seq_lens: DeviceArray
    block_table: DeviceArray
    slot_mapping: DeviceArray


class PackedLinear(ABC):
    """Weights of a linear in the backend's own layout. ``in_features`` K, ``out_features`` N."""

    in_features: int
    out_features: int

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held by the packed weights and the bias."""


def _check_weights(weights: Sequence[Weight], biases: Sequence[Array | None] | None) -> None:
    """Raise TypeError or ValueError unless ``pack_linear`` can take them."""
    for part in (*weights, *(bias for bias in biases or () if bias is not None)):
        if not is_weight(part):
            kind = part.dtype if isinstance(part, np.ndarray) else type(part).__name__
            raise TypeError(
                f"pack_linear needs floating point weights in numpy arrays, or blocks; got {kind}"
            )
    if not weights or any(len(w.shape) != 2 or w.shape[1] != weights[0].shape[1] for w in weights):
        raise ValueError("pack_linear needs matrices [N_i, K] that share K")
    if biases is not None and [None if b is None else b.shape for b in biases] != [
        None if b is None else w.shape[:1] for b, w in zip(biases, weights)
    ]:
        raise ValueError("pack_linear needs one bias [N_i], or None, for each matrix")


def _joined(weights: Sequence[Weight], biases: Sequence[Array | None] | None) -> Array | None:
    """float32 [N] of a linear put together from ``weights``, zeros where there is no bias; None if there is none."""
    if biases is None or all(bias is None for bias in biases):
        return None
    return np.concatenate(
        [np.zeros(len(w), np.float32) if b is None else float32(b) for w, b in zip(weights, biases)]
    )


class Kernels(ABC):
    """One backend. Stateless but for what ``pack_linear`` returns, so engines may share an instance."""

    name: str
    device = "cpu"
    """Where weights, activations and the KV cache are: ``cpu``, or what torch calls the device."""
    dtype = "float32"
    """Of activations."""
    uses_numpy = True
    """Whether its ``DeviceArray`` is numpy's."""

    def to_device(self, array: Array) -> DeviceArray:
        """The values where this backend computes, in its own kind of array; the same memory where that is possible."""
        return array

    def to_host(self, array: DeviceArray) -> Array:
        """The values in this process' memory; the same memory where that is possible."""
        return array

    def pack_linear(
        self, weights: Sequence[Weight], biases: Sequence[Array | None] | None = None, dtype: str = "auto"
    ) -> PackedLinear:
        """Pack matrices [N_i, K] as one linear of N = sum N_i outputs.

        weights: see ``weights``; biases: numpy arrays [N_i], or None.
        dtype: how weights are stored: ``float32``, ``bfloat16``, ``int8``, ``int4``; ``auto`` keeps what they have, or
        else what loses nothing.
        Raises TypeError or ValueError for arrays that are no such matrices, ValueError for a dtype the backend does not
        have.
        """
        _check_weights(weights, biases)
        return self._pack(weights, _joined(weights, biases), dtype)

    @abstractmethod
    def _pack(self, weights: Sequence[Weight], bias: Array | None, dtype: str) -> PackedLinear:
        """:meth:`pack_linear` of what was looked at. bias: float32 [N], for the backend to keep."""

    @abstractmethod
    def linear(self, x: DeviceArray, weight: PackedLinear) -> DeviceArray:
        """x [T, K] -> x @ W.T + b, [T, N]."""

    @abstractmethod
    def logits(self, x: DeviceArray, head: PackedLinear, softcap: float | None = None) -> DeviceArray:
        """Scores of the vocabulary for x [T, K], float32 [T, N]: ``linear``, then, with a soft cap,
        ``softcap * tanh(score / softcap)``."""

    @abstractmethod
    def embedding(self, ids: DeviceArray, table: PackedLinear) -> DeviceArray:
        """Rows ``ids`` (int64 [T]) of a packed matrix [vocab, K] as float32 [T, K] (so tied heads are held once)."""

    @abstractmethod
    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float) -> DeviceArray:
        """x [..., D] normalised over the last dimension, times ``weight`` [D] (the final multiplier)."""

    @abstractmethod
    def add_rms_norm(
        self, x: DeviceArray, residual: DeviceArray, weight: DeviceArray, eps: float
    ) -> DeviceArray:
        """``residual += x`` in place, then rms_norm of it. x, residual and the result are [T, D]."""

    @abstractmethod
    def rotary_and_cache(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        cos: DeviceArray,
        sin: DeviceArray,
        cache: LayerCache,
        slot_mapping: DeviceArray,
    ) -> None:
        """Rotate q [T, H, D] and k [T, G, D] in place and write k and v to their slots.

        cos, sin: float32 [T, R/2], R <= D even; pair (i, i + R/2) of the first R elements is rotated (the "rotate half"
        convention of Hugging Face); the rest passes through. q, k, v may be strided views of one qkv matrix
        whose last two dimensions are contiguous.
        """

    @abstractmethod
    def plan(self, inputs: AttentionInputs) -> Any:
        """Host work of attention, done once per step and handed to ``paged_attention`` in each layer."""

    @abstractmethod
    def paged_attention(
        self,
        plan: Any,
        q: DeviceArray,
        cache: LayerCache,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: DeviceArray | None = None,
    ) -> DeviceArray:
        """Causal attention of q [T, H, D] (strided views allowed, as above) over the paged context -> [T, H * D].

        A query at position p sees positions j <= p, and p - j < window if a window is given. Scores are
        ``softcap * tanh(score * scale / softcap)`` with a soft cap; ``sinks`` [H] adds exp(sink) to each row's
        denominator.
        """

    @abstractmethod
    def act_and_mul(self, x: DeviceArray, activation: str) -> DeviceArray:
        """x [T, 2I] -> act(x[:, :I]) * x[:, I:]. activation: ``silu``, ``gelu`` (erf) or ``gelu_tanh``."""

    @abstractmethod
    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; used by copy-on-write."""

    def to_dense(self, weight: Weight) -> Array:
        """The values [N, K] as an array of floats, the fastest way that this backend has."""
        return to_dense(weight)

    def empty_cache(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str = "float32",
    ) -> list[LayerCache]:
        """KV cache of a model; see ``CacheSpec``. Nothing in it is initialised.

        On the CPU memory is reserved only; the operating system commits a page when it is written.
        """
        parts = CacheSpec(num_layers, num_kv_heads, head_dim, block_size, dtype).parts
        return [
            LayerCache(*(self._empty((num_blocks, *part.shape), part.dtype) for part in parts))
            for _ in range(num_layers)
        ]

    def _empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Memory for a part of a cache, by the name of its dtype."""
        return reserve(shape, DTYPES[dtype])
