"""Hugging Face config.json -> DecoderSpec, by rules that follow transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from paged_backend.errors import UnsupportedModelError
from paged_backend.models.families import BY_MODEL_TYPE, FAMILIES, Family
from paged_backend.models.rope_config import rope_for_layers
from paged_backend.models.spec import DecoderSpec

_ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
    }
)

SLIDING, FULL = "sliding_attention", "full_attention"


def supported_architectures() -> tuple[str, ...]:
    """Names that ``config.json`` may have under ``architectures``."""
    return tuple(FAMILIES)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture a config names, by ``architectures`` or else by ``model_type``.

    Raises UnsupportedModelError naming it and the supported ones.
    """
    named = config.get("architectures") or []
    name = named[0] if named else BY_MODEL_TYPE.get(config.get("model_type", ""), config.get("model_type"))
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    return str(name)


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes. Raises UnsupportedModelError naming what is not supported."""
    architecture = architecture_of(config)
    family = FAMILIES[architecture]
    merged = _merge(config, family)
    _refuse_unsupported(merged, architecture)

    def size(key: str) -> int:
        value = merged.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
    merged.setdefault("num_key_value_heads", heads)
    if merged["num_key_value_heads"] is None:
        merged["num_key_value_heads"] = heads
    groups = size("num_key_value_heads")
    if heads % groups:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
        )
    head_dim = size("head_dim") if merged.get("head_dim") is not None else hidden // heads
    layer_types = _layer_types(merged, family, layers)
    ropes, rope_specs = rope_for_layers(merged, architecture, layer_types, head_dim)
    scalar = merged["query_pre_attn_scalar"] if family.softcaps else head_dim
    bias = family.optional_bias and bool(merged.get("attention_bias"))
    position = size("max_position_embeddings")
    extended = (
        r.factor * (r.original_max_position or position) for r in rope_specs if r.rope_type in _EXTENDING
    )
    return DecoderSpec(
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        norm_eps=float(merged["rms_norm_eps"]),
        activation=_activation(merged, family),
        max_position=position,
        max_position_limit=max([position, *map(int, extended)]),
        scale=float(scalar) ** -0.5,
        windows=_windows(merged, layer_types),
        rope_specs=rope_specs,
        ropes=ropes,
        tied=bool(merged["tie_word_embeddings"]),
        qkv_bias=family.qkv_bias or bias,
        out_bias=bias,
        mlp_bias=family.optional_mlp_bias and bool(merged.get("mlp_bias")),
        fused_qkv=family.fused,
        fused_gate_up=family.fused,
        qk_norm=family.qk_norm,
        sandwich_norms=family.sandwich_norms,
        norm_plus_one=family.gemma,
        # transformers rounds this factor to the dtype of the weights; math here is fp32
        embedding_scale=float(hidden) ** 0.5 if family.gemma else 1.0,
        attention_softcap=merged.get("attn_logit_softcapping") if family.softcaps else None,
        final_softcap=merged.get("final_logit_softcapping") if family.softcaps else None,
        eos_token_ids=_token_ids(merged.get("eos_token_id")),
        bos_token_id=merged.get("bos_token_id"),
        pad_token_id=merged.get("pad_token_id"),
    )


_EXTENDING = ("linear", "dynamic", "yarn")


def _merge(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """One flat config: family defaults, the text part of a multimodal config, what its top level says."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return {**family.defaults, **config}
    shared = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")
    top = {key: config[key] for key in shared if config.get(key) is not None}
    return {**family.defaults, **text, **top}


def _refuse_unsupported(merged: Mapping[str, Any], architecture: str) -> None:
    if merged.get("quantization_config"):
        method = merged["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantization_config (method {method!r}) is not supported: load the unquantized checkpoint "
            "and quantize it here with quantization='int8' or 'int4'"
        )
    if merged.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported: this engine is causal")
    if architecture.startswith("Gemma3") and merged.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError("attn_logit_softcapping is not supported for Gemma 3, which has none")


def _activation(merged: Mapping[str, Any], family: Family) -> str:
    name = merged[family.activation_key]
    if family.gemma and family.activation_key == "hidden_act" and name == "gelu":
        return "gelu_tanh"  # first Gemma's configs say gelu and mean its tanh approximation
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{family.activation_key} {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _layer_types(merged: dict[str, Any], family: Family, layers: int) -> tuple[str, ...]:
    """``sliding_attention`` or ``full_attention`` for each layer, as transformers decides it."""
    given = merged.get("layer_types")
    window = merged.get("sliding_window")
    if family.windows == "none":
        derived = [FULL] * layers
    elif family.windows == "all":
        derived = [FULL if window is None else SLIDING] * layers
    elif family.windows == "qwen":
        if not merged["use_sliding_window"]:
            merged["sliding_window"] = window = None
        first = merged["max_window_layers"]
        derived = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    else:
        pattern = merged["sliding_window_pattern"]
        derived = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    if given is None:
        return tuple(derived)
    if len(given) != layers or any(kind not in (SLIDING, FULL) for kind in given):
        raise UnsupportedModelError(
            f"layer_types must name {SLIDING} or {FULL} for each of the {layers} layers, got {given!r}"
        )
    if family.windows in ("none", "all") and list(given) != derived:
        # transformers ignores layer_types here: whichever reading we took, somebody would be surprised
        raise UnsupportedModelError(
            f"layer_types {given!r} contradicts sliding_window {window!r} in this family: make them agree"
        )
    if SLIDING in given and window is None:
        raise UnsupportedModelError(
            f"layer_types asks for {SLIDING}, but sliding_window is not set or not used"
        )
    return tuple(given)


def _windows(merged: Mapping[str, Any], layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    window = merged.get("sliding_window")
    if SLIDING in layer_types and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(f"sliding_window must be a positive integer, got {window!r}")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
