"""Decoder: one transformer decoder for every family, written once over the kernel contract.

Tensor parallelism will split ``qkv`` and ``gate_up`` by column and ``out`` and ``down`` by row, with an
all-reduce after the latter two; no other operation here looks across heads or across the columns of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.checkpoints.checkpoint import TensorSource
from paged_backend.kernels.array import float32
from paged_backend.kernels.base import AttentionInputs, DeviceArray, Kernels, PackedLinear
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.models.rope import RotaryEmbedding
from paged_backend.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: DeviceArray
    qkv: PackedLinear
    q_norm: DeviceArray | None
    k_norm: DeviceArray | None
    out: PackedLinear
    post_attention_norm: DeviceArray | None
    mlp_norm: DeviceArray
    gate_up: PackedLinear
    down: PackedLinear
    post_mlp_norm: DeviceArray | None
    window: int | None
    rope: int


class Decoder:
    """A decoder whose weights are packed for ``kernels``; runs flat batches over paged KV.

    weights: tensor name -> reader, complete for ``spec`` (see tensors.py); nothing of it is kept.
    dtype: how linears are stored, see ``Kernels.pack_linear``. max_model_len: longest sequence that will be
    served, None for the model's context; fixes the frequencies of length-dependent ropes (see rope.py). on_packed:
    called whenever a large matrix or a layer has been read and packed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, TensorSource],
        kernels: Kernels,
        dtype: str = "auto",
        max_model_len: int | None = None,
        on_packed: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.max_model_len = max_model_len or spec.max_position
        pack = _Packer(spec, weights, kernels, dtype)
        # the largest first, while there is least beside what they are read from
        self.embed_tokens = pack.table("model.embed_tokens.weight")
        on_packed()
        self.lm_head = self.embed_tokens if spec.tied else pack.table("lm_head.weight")
        on_packed()
        self.layers: list[_Layer] = []
        for i in range(spec.num_layers):
            self.layers.append(pack.layer(i))
            on_packed()
        self.norm = pack.norm("model.norm.weight")
        self.ropes = [RotaryEmbedding(rope, self.max_model_len) for rope in spec.rope_specs]
        if not kernels.uses_numpy:
            for rope in self.ropes:
                rope.tabulate(self.max_model_len, kernels)

    def forward(
        self,
        input_ids: DeviceArray,
        positions: DeviceArray,
        attention: AttentionInputs,
        logit_rows: DeviceArray,
        caches: Sequence[LayerCache],
    ) -> DeviceArray:
        """One step over a flat batch -> logits float32 [R, vocab].

        input_ids, positions: int64 [T]. logit_rows: int64 [R], rows of the batch whose logits are wanted,
        possibly none. caches: one per layer; this step's keys and values are written at
        ``attention.slot_mapping``.
        """
        kernels, spec = self.kernels, self.spec
        eps = spec.norm_eps
        cos_sin = [rope.cos_sin(positions) for rope in self.ropes]
        plan = kernels.plan(attention)

        residual = kernels.embedding(input_ids, self.embed_tokens)
        if spec.embedding_scale != 1.0:
            residual *= spec.embedding_scale
        hidden = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            hidden = self._attention(
                layer, hidden, cos_sin[layer.rope], caches[i], attention.slot_mapping, plan
            )
            last = i + 1 == len(self.layers)
            if last:
                if len(logit_rows) == 0:
                    return kernels.to_device(np.empty((0, spec.vocab_size), np.float32))
                # keys and values are all written: only rows that need logits go on
                hidden, residual = hidden[logit_rows], residual[logit_rows]
            hidden = kernels.linear(hidden, layer.out)
            if layer.post_attention_norm is not None:
                hidden = kernels.rms_norm(hidden, layer.post_attention_norm, eps)
            hidden = kernels.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = kernels.linear(hidden, layer.gate_up)
            hidden = kernels.act_and_mul(hidden, spec.activation)
            hidden = kernels.linear(hidden, layer.down)
            if layer.post_mlp_norm is not None:
                hidden = kernels.rms_norm(hidden, layer.post_mlp_norm, eps)
            next_norm = self.norm if last else self.layers[i + 1].input_norm
            hidden = kernels.add_rms_norm(hidden, residual, next_norm, eps)

        return kernels.logits(hidden, self.lm_head, spec.final_softcap)

    def _attention(
        self,
        layer: _Layer,
        hidden: DeviceArray,
        cos_sin: tuple[DeviceArray, DeviceArray],
        cache: LayerCache,
        slot_mapping: DeviceArray,
        plan: Any,
    ) -> DeviceArray:
        """hidden [T, D] -> heads' outputs [T, H * D], before the output projection."""
        kernels, spec = self.kernels, self.spec
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = kernels.linear(hidden, layer.qkv).reshape(len(hidden), heads + 2 * groups, dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + groups], qkv[:, heads + groups :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, spec.norm_eps)
        kernels.rotary_and_cache(q, k, v, *cos_sin, cache, slot_mapping)
        return kernels.paged_attention(
            plan, q, cache, spec.scale, window=layer.window, softcap=spec.attention_softcap
        )

    def nbytes(self) -> int:
        """Bytes held by packed weights; the head counts once if it is the embedding."""
        linears = [self.embed_tokens, *([] if self.lm_head is self.embed_tokens else [self.lm_head])]
        for layer in self.layers:
            linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return sum(linear.nbytes() for linear in linears)


@dataclass(frozen=True, slots=True)
class _Packer:
    """Turns a checkpoint's tensors into packed linears and norm multipliers, one layer at a time."""

    spec: DecoderSpec
    weights: Mapping[str, TensorSource]
    kernels: Kernels
    dtype: str

    def table(self, name: str) -> PackedLinear:
        # 4 bits cost the head and the embedding too much; they stay at 8
        return self.kernels.pack_linear(
            [self.weights[name]()], None, "int8" if self.dtype == "int4" else self.dtype
        )

    def norm(self, name: str) -> DeviceArray:
        weight = np.array(
            float32(self.weights[name]())
        )  # a copy: a view of a mapped file would die with the file
        return self.kernels.to_device(weight + np.float32(1) if self.spec.norm_plus_one else weight)

    def linear(self, names: Sequence[str], bias: bool) -> PackedLinear:
        weights = [self.weights[f"{name}.weight"]() for name in names]
        biases = [self.weights[f"{name}.bias"]() for name in names] if bias else None
        return self.kernels.pack_linear(weights, biases, self.dtype)

    def layer(self, index: int) -> _Layer:
        spec, at = self.spec, f"model.layers.{index}."
        attn, mlp = f"{at}self_attn.", f"{at}mlp."
        qkv = ["qkv_proj"] if spec.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if spec.fused_gate_up else ["gate_proj", "up_proj"]
        after_attention = self.norm(f"{at}post_attention_layernorm.weight")
        return _Layer(
            input_norm=self.norm(f"{at}input_layernorm.weight"),
            qkv=self.linear([attn + name for name in qkv], spec.qkv_bias),
            q_norm=self.norm(f"{attn}q_norm.weight") if spec.qk_norm else None,
            k_norm=self.norm(f"{attn}k_norm.weight") if spec.qk_norm else None,
            out=self.linear([f"{attn}o_proj"], spec.out_bias),
            # without sandwich norms, what Hugging Face names "post attention" is the norm before the MLP
            post_attention_norm=after_attention if spec.sandwich_norms else None,
            mlp_norm=self.norm(f"{at}pre_feedforward_layernorm.weight")
            if spec.sandwich_norms
            else after_attention,
            gate_up=self.linear([mlp + name for name in gate_up], spec.mlp_bias),
            down=self.linear([f"{mlp}down_proj"], spec.mlp_bias),
            post_mlp_norm=self.norm(f"{at}post_feedforward_layernorm.weight")
            if spec.sandwich_norms
            else None,
            window=spec.windows[index],
            rope=spec.ropes[index],
        )
