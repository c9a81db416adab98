"""Folders of quantised safetensors: their values are those of the documented layout, and so are their logits."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from paged_backend.checkpoints.loading import load_checkpoint, load_config
from paged_backend.config import EngineConfig
from paged_backend.errors import ModelLoadError, UnsupportedModelError
from paged_backend.kernels.array import float32
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.quantized import QuantizedWeight
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.weights import same_values
from paged_backend.models.architectures import spec_from_config
from paged_backend.models.loading import load_model
from tests.helpers.quantized_writers import FORMATS, gptq, int32
from tests.models.conftest import PagedModel

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DENSE = "model.layers.1.mlp.down_proj"
"""A layer that is left as it was, as skip lists ask for."""


@pytest.fixture(scope="module")
def plain(save_random):
    return save_random(hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL))[0]


@pytest.fixture
def write(plain, tmp_path):
    """(settings, writer, head too?) -> folder of the quantised model, folder of the same values in float32."""

    def made(settings, writer, head=False, seed=0):
        random = np.random.default_rng(seed)
        dense = load_file(plain / "model.safetensors")
        quantised, twin = {}, dict(dense)
        for name, tensor in dense.items():
            module = name.removesuffix(".weight")
            if (not module.endswith("_proj") and not (head and module == "lm_head")) or module == DENSE:
                quantised[name] = tensor
                continue
            parts, values = writer(random, *tensor.shape)
            quantised.update({f"{module}.{part}": value for part, value in parts.items()})
            twin[name] = torch.from_numpy(np.ascontiguousarray(values))
        folders = tmp_path / "quantised", tmp_path / "twin"
        for folder, tensors in zip(folders, (quantised, twin)):
            shutil.copytree(plain, folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((plain / "config.json").read_text())
        (folders[0] / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        return folders

    return made


@pytest.mark.parametrize("name", FORMATS)
def test_values_and_logits_are_those_of_the_layout(name, write):
    settings, writer = FORMATS[name]
    folder, twin = write(settings, writer, head=True)
    values = load_file(twin / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    assert not checkpoint.integers
    quantised = 0
    for tensor, expected in values.items():
        weight = checkpoint.tensors[tensor]()
        assert checkpoint.shapes[tensor] == weight.shape == tuple(expected.shape)
        if isinstance(weight, QuantizedWeight):
            quantised += 1
            np.testing.assert_array_equal(weight.to_dense(), expected.numpy(), err_msg=tensor)
            assert weight.nbytes > 0
        else:
            np.testing.assert_array_equal(float32(weight), expected.numpy())
    assert quantised == 2 * 7 - 1 + 1  # projections of two layers, without DENSE, and the head

    module = hf.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    prompt = list(range(3, 40))
    with torch.inference_mode():
        expected_logits = module(torch.tensor([prompt])).logits[0]
    largest = float(expected_logits.abs().max())
    # on blocks, activations have 16 bits
    for kernels, limit in ((ReferenceKernels(), 2e-5 * largest), (CpuKernels(threads=1), 1e-3 * largest)):
        model = PagedModel(load_model(EngineConfig(str(folder)), kernels))
        got = model.logits(prompt, [30, 7])
        assert (got - expected_logits).abs().max() < limit, kernels.name


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_columns_are_those_of_the_values(name):
    settings, writer = FORMATS[name]
    weight, values = read_one(settings, writer, 64, 160)
    for start, stop in ((0, 64), (0, 17), (5, 6), (13, 50), (24, 64), (64, 64)):
        np.testing.assert_array_equal(weight.rows(start, stop).to_dense(), values[start:stop])
        part = weight.rows(start, stop).rows((stop - start) // 3, stop - start)
        np.testing.assert_array_equal(part.to_dense(), values[start + (stop - start) // 3 : stop])
    cut = 0
    for start, stop in ((0, 160), (32, 96), (40, 160), (80, 120), (96, 160), (64, 128), (1, 160)):
        try:
            part = weight.columns(start, stop)
        except ValueError:
            cut += 1
            continue
        np.testing.assert_array_equal(part.to_dense(), values[:, start:stop])
    assert cut < 7
    assert same_values(weight, values)


def read_one(settings, writer, n, k, seed=1):
    """One weight of a format through its reader, and its values."""
    from paged_backend.checkpoints.quantized.methods import read_quantized
    from paged_backend.checkpoints.quantized.parts import Stored

    names = {
        torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float16: "F16",
        torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
    }  # fmt: skip

    def array(tensor):
        if tensor.dtype == torch.bfloat16:
            return tensor.float().numpy()
        return (
            tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor
        ).numpy()

    tensors, values = writer(np.random.default_rng(seed), n, k)
    stored = {
        f"m.{part}": Stored(names[tensor.dtype], tuple(tensor.shape), lambda tensor=tensor: array(tensor))
        for part, tensor in tensors.items()
    }
    weights, rest = read_quantized("here", settings, stored)
    assert list(weights) == ["m.weight"]
    assert not rest
    return weights["m.weight"].read(), values


def test_weights_that_grow_in_memory_are_told_once(write, tmp_path, caplog):
    for name, told in (("gptq-4-asym-v1", 0), ("nf4", 1)):
        folder, _ = write(*FORMATS[name], head=True)
        caplog.clear()
        load_model(EngineConfig(str(folder)), CpuKernels(threads=1))
        assert (
            sum("take" in record.message and "in memory" in record.message for record in caplog.records)
            == told
        )
        load_model(EngineConfig(str(folder), quantization="int8"), CpuKernels(threads=1))
        assert len(caplog.records) == told
        for made in tmp_path.iterdir():
            shutil.rmtree(made)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(write):
    """Some tools write one for each linear."""
    plain_writer = FORMATS["gptq-4-asym-v1"][1]
    for value in (0.0, 0.5):

        def with_bias(random, n, k, value=value):
            tensors, values = plain_writer(random, n, k)
            return tensors | {"bias": torch.full((n,), value, dtype=torch.float16)}, values

        folder, twin = write(FORMATS["gptq-4-asym-v1"][0], with_bias)
        if value:
            with pytest.raises(ModelLoadError, match=r"proj\.bias' that LlamaForCausalLM has no use for"):
                load_model(EngineConfig(str(folder)), ReferenceKernels())
        else:
            load_model(EngineConfig(str(folder)), ReferenceKernels())
        for made in (folder, twin):
            shutil.rmtree(made)


def test_what_a_config_says_of_the_model_does_not_change_with_quantisation(plain, write):
    folder, _ = write(*FORMATS["awq"])
    assert spec_from_config(load_config(str(folder))[0]) == spec_from_config(load_config(str(plain))[0])


def test_settings_in_a_file_of_their_own_are_found(write):
    """As GPTQ folders had them before they were part of config.json."""
    settings, writer = FORMATS["gptq-4-asym-v1"]
    folder, twin = write(settings, writer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "quantize_config.json").write_text(
        json.dumps(config.pop("quantization_config") | {"quant_method": "gptq"})
    )
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.mlp.up_proj.weight"
    expected = load_file(twin / "model.safetensors")[name].numpy()
    np.testing.assert_array_equal(load_checkpoint(folder).tensors[name]().to_dense(), expected)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not supported; supported are gptq, awq, compressed-tensors, fp8"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5 is not supported; use 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported; use 4 and 'gemm'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ],
)  # fmt: skip
def test_a_method_or_setting_without_a_reader_is_named(settings, told, write):
    folder, _ = write(settings, FORMATS["gptq-4-sym-v1"][1])
    with pytest.raises(UnsupportedModelError, match=told):
        load_checkpoint(folder)


def test_a_folder_that_is_not_quantised_as_its_config_says_is_refused(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "model")
    config = json.loads((plain / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ModelLoadError, match="says gptq, but no tensor is quantised that way"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scales": None}, "but no scales"),
        ({"qzeros": torch.zeros(2, 8)}, "qzeros has dtype F32, expected I32"),
        ({"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "groups beyond"),
        ({"g_idx": torch.zeros(63, dtype=torch.int32)}, "no 2, 3, 4 or 8 bits"),
        ({"scales": torch.ones(2, 5, dtype=torch.float16)}, "do not fit"),
    ],
)
def test_tensors_that_make_up_no_weight_are_named(change, told, write):
    plain_writer = gptq(4, 32, True, False, act_order=False)

    def damaged(random, n, k):
        tensors, values = plain_writer(random, n, k)
        if (n, k) == (96, 64):
            tensors |= {name: value.clone() for name, value in change.items() if value is not None}
            tensors = {name: tensor for name, tensor in tensors.items() if change.get(name, 0) is not None}
        return tensors, values

    folder, _ = write({"quant_method": "gptq", "bits": 4, "group_size": 32}, damaged)
    with pytest.raises(ModelLoadError, match=told):
        load_model(EngineConfig(str(folder)), ReferenceKernels())


def test_a_zero_point_of_all_ones_wraps_without_touching_its_neighbour():
    """Version 1 stores zero points minus one: 0 is all ones, and adding one may not carry."""
    n, k = 32, 32
    for bits in (2, 3, 4, 8):
        count = n * bits // 32
        tensors = {
            "qweight": int32([[0] * n] * (k * bits // 32)),
            "qzeros": int32([[-1] * count]),
            "scales": torch.ones(1, n, dtype=torch.float16),
            "g_idx": torch.zeros(k, dtype=torch.int32),
        }
        settings = {"quant_method": "gptq", "bits": bits, "sym": False}
        weight, _ = read_one(settings, lambda *_, tensors=tensors: (tensors, None), n, k)
        np.testing.assert_array_equal(weight.to_dense(), np.zeros((n, k)))
