"""A random Llama on disk, made without torch and transformers, so that tests of what needs neither can have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def write_tiny_llama(folder: Path, corpus: Sequence[str], seed: int = 0, **config: Any) -> None:
    """Config, float32 weights, a byte-level tokenizer trained on ``corpus`` and a chat template.

    Two layers, a vocabulary of 300 and a context of 512, unless ``config`` says otherwise.
    """
    from safetensors.numpy import save_file

    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    ends = {"bos_token_id": settings["bos_token_id"], "eos_token_id": settings["eos_token_id"]}
    _write(folder / "config.json", settings)
    _write(folder / "generation_config.json", ends)
    save_file(_weights(settings, np.random.default_rng(seed)), folder / "model.safetensors")
    _tokenizer(corpus).save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
    _write(folder / "tokenizer_config.json", {**named, **kind})
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def _weights(config: dict[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    """As transformers draws them: norms of ones, everything else normal with a deviation of 0.02."""
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = hidden // config["num_attention_heads"]
    keys = size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes.update({f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (words, hidden)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _tokenizer(corpus: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(corpus, trainer)
    return made
