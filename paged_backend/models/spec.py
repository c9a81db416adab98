"""DecoderSpec: a decoder described by numbers, so that one piece of model code runs every family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: ``inv_freq`` [R/2] before any length-dependent choice, R = ``dim``.

    ``scaling`` is the ``rope_type`` of Hugging Face with its parameters already turned into ``inv_freq``; longrope keeps two
    sets, chosen by sequence length against ``original_max_position`` (see rope.py).
    """

    dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    original_max_position: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """All a native decoder needs to know. ``windows`` has one entry per layer (None is full attention),
    ``ropes`` one index per layer into ``rope_specs``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position: int
    scale: float
    windows: tuple[int | None, ...]
    rope_specs: tuple[RopeSpec, ...]
    ropes: tuple[int, ...]
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_plus_one: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
