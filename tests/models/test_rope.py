"""Rotary embeddings against transformers' own frequencies."""

from __future__ import annotations

import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paged_backend.models.architectures import spec_from_config
from paged_backend.models.rope import RotaryEmbedding, inverse_frequencies

SHAPE = {
    "vocab_size": 10,
    "hidden_size": 256,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
FACTORS = {
    "short_factor": [1 + i / 50 for i in range(64)],
    "long_factor": [1 + i / 5 for i in range(64)],
}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, own attention factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.7,
    },
    "yarn, mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, shrinking": {"factor": 1.0, "original_max_position_embeddings": 4096},
    "longrope": {**FACTORS, "original_max_position_embeddings": 512},
    "longrope, factor": {**FACTORS, "original_max_position_embeddings": 512, "factor": 2.0},
    "longrope, attention factor": {
        **FACTORS,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.3,
    },
}


@pytest.fixture(params=list(ROPES))
def rope(request):
    parameters = {"rope_type": request.param.split(",")[0], "rope_theta": 5e5, **ROPES[request.param]}
    config = hf.LlamaConfig(**SHAPE, rope_parameters=parameters)
    return config, spec_from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope_specs[0]


@pytest.mark.parametrize("length", [256, 4096, 16384])
def test_frequencies_equal_transformers_for_a_sequence_of_the_longest_length(rope, length):
    config, spec = rope
    if spec.rope_type == "default":
        theirs, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[spec.rope_type](config, seq_len=length)
    ours, our_factor = inverse_frequencies(spec, length)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-9)


def test_cos_and_sin_equal_transformers_at_any_positions(rope):
    config, spec = rope
    positions = torch.tensor([0, 1, 4095, 17, 17, 1023, 1024, 1025, 3000])
    theirs = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    ours = RotaryEmbedding(spec, 4096).cos_sin(positions.numpy())
    for mine, reference in zip(ours, theirs):
        assert mine.shape == (9, 64)
        # angles near 4096 carry the rounding of float32: one unit in the last place is 2.4e-4
        np.testing.assert_allclose(mine, reference[0, :, :64].numpy(), rtol=0, atol=2e-3)


def test_values_of_a_position_do_not_depend_on_who_asked_first(rope):
    _, spec = rope
    grown, at_once = RotaryEmbedding(spec, 8192), RotaryEmbedding(spec, 8192)
    for length in (1, 5, 1024, 1025, 5000):
        grown.cos_sin(np.arange(length))
    everything = np.arange(6000)
    for step_by_step, direct in zip(grown.cos_sin(everything), at_once.cos_sin(everything)):
        assert np.array_equal(step_by_step, direct)


def test_length_dependent_ropes_switch_at_the_limit():
    spec = spec_from_config(
        {**SHAPE, "model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    ).rope_specs[0]
    inside, at, beyond = (inverse_frequencies(spec, n)[0] for n in (100, 4096, 4097))
    assert np.array_equal(inside, at)
    assert (beyond[1:] < at[1:]).all()


def test_each_is_the_float32_nearest_to_that_of_its_angle(rope):
    """So that all machines have the same bits; mpmath knows the functions to any precision."""
    _, spec = rope
    embedding = RotaryEmbedding(spec, 4096)
    positions = np.array([1, 77, 1023, 3999])
    angles = positions.astype(np.float32)[:, None] * embedding.inv_freq
    for function, ours in zip((mpmath.cos, mpmath.sin), embedding.cos_sin(positions)):
        true = np.array([[float(function(mpmath.mpf(float(angle)))) for angle in row] for row in angles])
        assert np.array_equal(ours, true.astype(np.float32) * np.float32(embedding.attention_factor))


def test_loading_code_does_not_import_transformers():
    code = "import sys, paged_backend.models.loading; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
