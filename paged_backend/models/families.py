"""What each supported family fixes in code, and the config values that its files may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    defaults: those of transformers' config class. activation_key: the setting that names the activation.
    windows: ``none``; ``all``, one sliding window for every layer; ``qwen``, from max_window_layers on if
    switched on; ``alternating``, every layer but each sliding_window_pattern-th. optional_bias:
    attention_bias biases q, k, v and o. fused: qkv and gate_up are stored as one matrix each. gemma: norms multiply
    by 1 + weight, embeddings by sqrt(hidden_size). softcaps: has query_pre_attn_scalar and soft caps.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = "none"
    activation_key: str = "hidden_act"
    qkv_bias: bool = False
    optional_bias: bool = False
    optional_mlp_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    gemma: bool = False
    softcaps: bool = False


_LLAMA_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_QWEN_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    {
        **_GEMMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
    },
    windows="alternating",
    activation_key="hidden_activation",
    optional_bias=True,
    qk_norm=True,
    sandwich_norms=True,
    gemma=True,
    softcaps=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(_LLAMA_DEFAULTS, optional_bias=True, optional_mlp_bias=True),
        "MistralForCausalLM": Family(
            {
                **_LLAMA_DEFAULTS,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
            },
            windows="all",
        ),
        "Qwen2ForCausalLM": Family(_QWEN_DEFAULTS, windows="qwen", qkv_bias=True),
        "Qwen3ForCausalLM": Family(
            {**_QWEN_DEFAULTS, "head_dim": 128}, windows="qwen", optional_bias=True, qk_norm=True
        ),
        "GemmaForCausalLM": Family(
            {
                **_GEMMA_DEFAULTS,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "hidden_act": "gelu_pytorch_tanh",
            },
            optional_bias=True,
            gemma=True,
        ),
        "Gemma2ForCausalLM": Family(
            {
                **_GEMMA_DEFAULTS,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            windows="alternating",
            activation_key="hidden_activation",
            optional_bias=True,
            sandwich_norms=True,
            gemma=True,
            softcaps=True,
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Phi3ForCausalLM": Family(
            {
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "bos_token_id": 1,
                "eos_token_id": 32000,
                "pad_token_id": 32000,
                "tie_word_embeddings": False,
                "hidden_act": "silu",
            },
            windows="all",
            fused=True,
        ),
    }
)

BY_MODEL_TYPE = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma3_text": "Gemma3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
    }
)
