"""TritonKernels: the contract on a GPU, or on CPU tensors in Triton's interpreter (for tests).

Activations have one dtype, ``dtype``; norms, rotations, softmax and sums are taken in float32. Dense matrix
products on a GPU are torch's (cuBLAS): it is the only part whose order of summation may depend on the number of rows
of the batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.kernels.array import Array
from paged_backend.kernels.base import AttentionInputs, Kernels, PackedLinear
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.row_products import row_linear
from paged_backend.kernels.tensor import as_array, as_tensor, tensor_dtype
from paged_backend.kernels.triton import quantize
from paged_backend.kernels.triton.launch import AttentionPlan, Launcher
from paged_backend.kernels.triton.penalties import Penalties
from paged_backend.kernels.weights import Weight, to_dense

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DenseLinear(PackedLinear):
    """weight [N, K] and bias [N] or None, in the backend's dtype and on its device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class IntLinear(PackedLinear):
    """int8 or int4 weights (see ``quantize``) and bias float32 [N] or None."""

    def __init__(self, weights: quantize.IntWeights, bias: Tensor | None) -> None:
        self.weights, self.bias = weights, bias
        self.out_features, self.in_features = weights.numbers.shape[0], weights.in_features

    def nbytes(self) -> int:
        return self.weights.nbytes() + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class SizedInputs(AttentionInputs):
    """AttentionInputs whose sizes the host knows, so that planning reads nothing back from the device.

    query_counts: the numbers of queries that sequences of this step have, each once, in any order; more may be named.
    longest: at least the largest context length. Both bound the work that is launched; no result depends on them.
    """

    query_counts: tuple[int, ...]
    longest: int


class TritonKernels(Kernels):
    """device: ``cuda`` (an index may follow), or ``cpu`` with TRITON_INTERPRET=1. dtype: of activations and weights.

    Raises RuntimeError naming the fix where these kernels cannot run.
    """

    name = "triton"
    uses_numpy = False

    def __init__(self, device: str = "cuda", dtype: str = "bfloat16") -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        self.device, self.dtype = device, dtype
        self.torch_device, self.torch_dtype = torch.device(device), _DTYPES[dtype]
        if self.torch_device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(
                "Triton kernels run on a GPU: use device='cuda', or kernels='auto' on the CPU "
                "(for tests only, TRITON_INTERPRET=1 interprets them there)"
            )
        self._launch = Launcher.for_device(self.torch_device)

    def to_device(self, array: Array) -> Tensor:
        return as_tensor(array).to(self.torch_device)

    def to_host(self, array: Tensor) -> Array:
        return as_array(array)

    # --- linears -------------------------------------------------------------------------------------------------

    def _pack(self, weights: Sequence[Weight], bias: Array | None, dtype: str) -> DenseLinear | IntLinear:
        """dtype: ``auto`` and the backend's own dtype store that; ``int8`` and ``int4`` as in ``quantize``."""
        if dtype not in ("auto", self.dtype, "int8", "int4"):
            raise ValueError(
                f"dtype must be auto, int8, int4 or {self.dtype}, as these kernels' activations; got {dtype!r}"
            )
        on_device = None if bias is None else as_tensor(bias).to(self.torch_device)
        if dtype in ("int8", "int4"):
            pack = quantize.quantize_int8 if dtype == "int8" else quantize.quantize_int4
            parts = [pack(as_tensor(to_dense(w)).to(self.torch_device)) for w in weights]
            return IntLinear(quantize.join(parts), on_device)
        # cat copies even a single matrix: a view of a memory-mapped file would die with the file
        weight = torch.cat([as_tensor(to_dense(w)).to(self.torch_device, self.torch_dtype) for w in weights])
        return DenseLinear(weight, on_device.to(self.torch_dtype) if on_device is not None else None)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        if x.shape[-1] != weight.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, the weights take {weight.in_features}")
        if isinstance(weight, DenseLinear):
            if self.torch_device.type == "cpu":
                parts = (x, weight.weight, weight.bias)
                wide = [None if part is None else part.to(torch.float32).numpy() for part in parts]
                return torch.from_numpy(row_linear(*wide)).to(self.torch_dtype)
            return F.linear(x, weight.weight, weight.bias)
        if isinstance(weight, IntLinear):
            return self._launch.int_matmul(x.contiguous(), weight.weights, weight.bias)
        raise TypeError(f"weights were packed by another backend ({type(weight).__name__}); pack them here")

    def logits(self, x: Tensor, head: PackedLinear, softcap: float | None = None) -> Tensor:
        scores = self.linear(x, head).to(torch.float32)
        return scores if softcap is None else torch.tanh(scores / softcap) * softcap

    def embedding(self, ids: Tensor, table: PackedLinear) -> Tensor:
        """Rows as [T, K] in the backend's dtype. An id outside the table raises IndexError on the CPU only."""
        if isinstance(table, DenseLinear):
            return table.weight[ids]
        if isinstance(table, IntLinear):
            return quantize.dequantize(table.weights, ids).to(self.torch_dtype)
        raise TypeError(f"weights were packed by another backend ({type(table).__name__}); pack them here")

    # --- norms, activations, rotation ----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._launch.rms_norm(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not residual.is_contiguous():
            raise ValueError("the residual is changed in place and must be contiguous")
        return self._launch.rms_norm(x.contiguous(), residual, weight, eps)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        if activation not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"activation must be silu, gelu or gelu_tanh, got {activation!r}")
        return self._launch.act_and_mul(x.contiguous(), activation)

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
        self._launch.rotary_and_cache(q, k, v, cos.contiguous(), sin.contiguous(), cache, slot_mapping)

    # --- attention and its memory --------------------------------------------------------------------------------

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        """Sizes of the launches. Inputs that are no :class:`SizedInputs` are read back from the device for it."""
        if isinstance(inputs, SizedInputs):
            return AttentionPlan(inputs, inputs.query_counts, inputs.longest)
        counts = tuple(set(inputs.query_start_loc.diff().tolist()))
        return AttentionPlan(inputs, counts, max(inputs.seq_lens.tolist(), default=0))

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
        return self._launch.attention(plan, q, cache, scale, window, softcap, sinks)

    def copy_blocks(self, caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
        """All pairs of all layers at once, in a launch for each size that parts have; no block may be both a source and
        a destination."""
        if pairs:
            self._launch.copy_blocks(caches, pairs)

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.empty(shape, dtype=tensor_dtype(dtype), device=self.torch_device)

    # --- beyond the contract: what only a device runner asks for --------------------------------------------------

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, noise: Tensor
    ) -> Tensor:
        """One token id per row of logits float32 [R, V], int64 [R]; -1 for a row that is not finite.

        See ``sampling.sample`` for the arguments, each of length R and on the device.
        """
        return self._launch.sample(logits, temperature, top_k, top_p, min_p, noise)

    def penalise(self, logits: Tensor, ids: Tensor, by: Penalties) -> None:
        """Apply penalties to logits float32 [R, V] in place, by the tokens before them.

        ids: int64 [num_blocks, block_size], the token of each slot.
        """
        self._launch.penalise(logits, ids, by)
