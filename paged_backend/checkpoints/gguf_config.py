"""The ``config.json`` of a model from the metadata of its GGUF file.

Key names after the GGUF specification; defaults where llama.cpp leaves a value out are those of its model
loader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_backend.checkpoints.checks import check_layers
from paged_backend.checkpoints.gguf_metadata import GGUFFile
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.ggml import dequantize

_HF_NAMES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
_CONTROL = 3  # token type of markers such as <|im_end|>
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")


class _Keys:
    """Metadata of one architecture: ``keys.count("block_count")`` reads ``llama.block_count``."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._metadata, self._prefix = file.metadata, architecture

    def get(self, name: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, np.ndarray) and name != "attention.sliding_window_pattern":
            # written per layer; all families handled here have equal layers
            values = set(value.tolist())
            if len(values) != 1:
                raise UnsupportedModelError(
                    f"{self._prefix}.{name} differs between layers, which is not supported"
                )
            return values.pop()
        return value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(
                f"the metadata lacks {self._prefix}.{name}; the file is damaged or its converter was faulty"
            )
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; needed if there is no default."""
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if default == 0 else 1):
            raise ModelLoadError(
                f"{self._prefix}.{name} is {value!r}, not a count; the file is damaged or its converter was faulty"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; needed if there is no default."""
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelLoadError(
                f"{self._prefix}.{name} is {value!r}, not a number; the file is damaged or its converter was faulty"
            )
        return value


def build_config(files: Sequence[GGUFFile]) -> dict[str, Any]:
    """A dict like Hugging Face's ``config.json``.

    Raises ``UnsupportedModelError`` naming what has no implementation, ``ModelLoadError`` naming a key or
    tensor that is missing.
    """
    file = files[0]
    tensors = {name: (part, info) for part in files for name, info in part.tensors.items()}
    architecture = file.metadata.get("general.architecture")
    if architecture not in _HF_NAMES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(sorted(_HF_NAMES))}"
        )
    keys = _Keys(file, architecture)
    if keys.count("expert_count", 0):
        raise UnsupportedModelError(
            f"{architecture} with {keys.get('expert_count')} experts (mixture of experts) is not supported"
        )
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("tensor 'token_embd.weight' is missing")
    window = keys.count("attention.sliding_window", 0)
    family = "mistral" if architecture == "llama" and window else architecture
    model_type, class_name = _HF_NAMES[family]
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    rotary = keys.count("rope.dimension_count", 0)
    head_dim = (
        keys.count("attention.key_length", 0)
        or (rotary if architecture in ("llama", "mistral") else 0)
        or max(1, hidden // heads)
    )
    check_layers(keys.count("block_count"), len(tensors), f"{architecture}.block_count")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"][1].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0 if architecture == "gemma3" else 10_000.0),
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    config["rope_scaling"] = _rope_scaling(keys, tensors, config)
    if family == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    elif family == "mistral":
        config["sliding_window"] = window or None
    elif family == "qwen2":
        config["use_sliding_window"] = False
    elif family == "qwen3":
        config.update(use_sliding_window=False, attention_bias="blk.0.attn_q.bias" in tensors)
    elif family == "phi3":
        original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
        config.update(
            sliding_window=window or None,
            original_max_position_embeddings=original,
            partial_rotary_factor=(rotary or head_dim) / head_dim,
        )
    else:
        _gemma(config, keys, architecture, window)
    return config


def _gemma(config: dict[str, Any], keys: _Keys, architecture: str, window: int | None) -> None:
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    if architecture == "gemma":
        return
    layers = config["num_hidden_layers"]
    # The file does not say how queries are scaled. Only the two 27B models use the width of the residual
    # stream per head instead of the head size; llama.cpp tells them by their layer counts, too.
    wide = layers == {"gemma2": 46, "gemma3": 62}[architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    scale = keys.get("attention.scale")
    config["query_pre_attn_scalar"] = round(scale**-2) if scale else scalar
    if architecture == "gemma2":
        window = window or 4096
        config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = keys.get("final_logit_softcapping", 30.0)
    else:
        config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping")
        config["final_logit_softcapping"] = keys.get("final_logit_softcapping")
        config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    config["sliding_window"] = window or None
    pattern = keys.get("attention.sliding_window_pattern", 2 if architecture == "gemma2" else 6)
    if isinstance(pattern, np.ndarray):
        sliding = [bool(flag) for flag in pattern.tolist()]
        if len(sliding) != layers:
            raise ModelLoadError(
                f"attention.sliding_window_pattern has {len(sliding)} entries for {layers} layers"
            )
    else:
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if s and window else "full_attention" for s in sliding]


def _rope_scaling(keys: _Keys, tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    def values(name: str) -> list[float]:
        part, info = tensors[name]
        return [float(x) for x in dequantize(part.raw(name), info.type)]

    longest = config["max_position_embeddings"]
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "type": "longrope",
            "long_factor": values("rope_factors_long.weight"),
            "short_factor": values("rope_factors_short.weight"),
        }
        attention = keys.get("rope.scaling.attn_factor")
        return scaling | ({"attention_factor": attention} if attention else {})
    if "rope_freqs.weight" in tensors:
        return _frequency_factors(values("rope_freqs.weight"), config)
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    if kind == "linear" or (kind == "none" and keys.get("rope.scale_linear")):
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length", longest),
        }
        for name, key in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
        ):
            value = keys.get(f"rope.scaling.yarn_{key}")
            if value is not None:
                scaling[name] = value
        return scaling
    if kind == "none":
        return None
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported")


def _frequency_factors(factors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings from per-frequency divisors, which is all that a converted Llama 3 keeps of its own.

    Llama 3's rule is recognised by computing it for the trained lengths it comes with and comparing; other
    divisors become a longrope whose two sets are equal, which means exactly the same.
    """
    theta, dim = config["rope_theta"], 2 * len(factors)
    wavelengths = [2 * math.pi * theta ** (2 * i / dim) for i in range(len(factors))]
    largest = max(factors)
    for exponent in range(8, 21):
        original = 1 << exponent
        expected = [_llama3_divisor(w, largest, 1.0, 4.0, original) for w in wavelengths]
        if largest > 1 and np.allclose(expected, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "type": "llama3",
                "factor": float(round(largest))
                if math.isclose(largest, round(largest), rel_tol=1e-6)
                else largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",
        "type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_divisor(wavelength: float, factor: float, low: float, high: float, original: int) -> float:
    """The rule of Llama 3.1's reference code: long wavelengths are stretched, short ones kept, a ramp
    between."""
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def build_generation_config(file: GGUFFile) -> dict[str, Any]:
    """``generation_config.json`` as far as a GGUF file knows it: bos, pad, and every token that ends a
    turn."""
    metadata = file.metadata
    found = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("pad", "padding"))
    }
    result = {name: value for name, value in found.items() if value is not None}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += _turn_ends(file)
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    if unique:
        result["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return result


def _turn_ends(file: GGUFFile) -> list[int]:
    """Ids of end-of-turn markers that the chat template writes; files of older converters name only one end
    token, often not the one the model ends its answers with."""
    template, types = (
        file.metadata.get("tokenizer.chat_template", ""),
        file.metadata.get("tokenizer.ggml.token_type"),
    )
    wanted = [marker for marker in _TURN_ENDS if isinstance(template, str) and marker in template]
    if not wanted or not isinstance(types, np.ndarray):
        return []
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens) != len(types):
        return []
    names = tokens.tolist()
    return [int(i) for i in np.flatnonzero(types == _CONTROL) if names[i] in wanted]
