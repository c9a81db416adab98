"""DecoderSpec: a decoder described by numbers, so that one piece of model code runs every family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of one rotary embedding, with the names of Hugging Face's ``rope_parameters``.

    rope_type: default, linear, dynamic, llama3, yarn or longrope. dim: rotated elements R of a head, even.
    max_position: ``max_position_embeddings`` of the config. attention_factor: None derives it from the
    formula of the type. rope.py turns this and the longest sequence that will be served into frequencies.
    """

    rope_type: str
    dim: int
    theta: float
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """All a native decoder needs to know.

    windows: one entry per layer, None is full attention. ropes: per layer an index into ``rope_specs``.
    max_position: the model's context. max_position_limit: longest context that its rope scaling allows, at
    least max_position. scale: multiplier of attention scores. tied: the head is the embedding.
    out_bias: bias of the attention output. fused_qkv, fused_gate_up: the checkpoint stores them as one
    matrix. qk_norm: RMS norm of each query and key head. sandwich_norms: norms after attention and MLP as
    well as before. norm_plus_one: norms multiply by 1 + weight.
    """

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
    max_position_limit: int
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
