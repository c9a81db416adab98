"""Every supported family against transformers, through save_pretrained and our own loader."""

from __future__ import annotations

import itertools
import random

import pytest
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.errors import UnsupportedModelError
from paged_backend.models.architectures import spec_from_config, supported_architectures

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA = {**SMALL, "head_dim": 24, "query_pre_attn_scalar": 40}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PHI = {**SMALL, "pad_token_id": 0, "eos_token_id": 2}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}

CASES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "llama tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama biases, own head size": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=20, hidden_act="gelu"),
    ),
    "llama one head per key": (hf.LlamaForCausalLM, hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 4})),
    "llama 3 rope": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "llama yarn": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, rope_parameters=YARN)),
    "llama linear rope": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    ),
    "llama dynamic rope": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    ),
    "mistral window 8": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=8)),
    "mistral window 4096": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=4096)),
    "mistral no window": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=None)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL)),
    "qwen2 tied": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, tie_word_embeddings=True)),
    # vllm #49795: the window applied although it is switched off, or the reverse
    "qwen2 window switched off": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, sliding_window=5)),
    "qwen2 window in upper layers": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen2 window but all layers full": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(
            **SMALL, use_sliding_window=True, sliding_window=5, layer_types=["full_attention"] * 2
        ),
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=32)),
    "qwen3 bias, window in layer 0": (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(
            **SMALL,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig(**SMALL, head_dim=24)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**GEMMA, sliding_window=7)),
    "gemma2 tight caps": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**GEMMA, sliding_window=64, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 3}, sliding_window=7, sliding_window_pattern=3),
    ),
    "gemma3 scaled global rope": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(
            **GEMMA,
            sliding_window=7,
            sliding_window_pattern=2,
            final_logit_softcapping=4.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**PHI)),
    "phi3 window 9, partial rotary": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(**PHI, sliding_window=9, partial_rotary_factor=0.5),
    ),
    "phi3 longrope, long": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(**PHI, rope_parameters=dict(LONGROPE), original_max_position_embeddings=16),
    ),
}

PROMPT = random.Random(1).choices(range(3, 300), k=41)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, make_pair):
    return make_pair(*CASES[request.param])


def test_logits_equal_transformers_in_one_shot_and_in_chunks(pair, close):
    theirs = pair.their_logits(PROMPT)
    for chunks in ([41], [1] * 41, [5, 8, 1, 16, 11], [40, 1]):
        close(pair.ours.logits(PROMPT, chunks), theirs)


def test_greedy_tokens_equal_generate_over_64_steps(pair):
    assert pair.ours.greedy(PROMPT[:20], 64) == pair.their_greedy(PROMPT[:20], 64)


def test_sequences_in_one_flat_batch_do_not_see_each_other(pair, close, new_sequence):
    # the long prompt comes first so that transformers stays on the long side of a longrope
    prompts = [PROMPT, PROMPT[5:35], PROMPT[::-1]]
    sequences = [new_sequence() for _ in prompts]
    first = pair.ours.step([(s, p[:13]) for s, p in zip(sequences, prompts)])
    # a prefill chunk, a decode and a long chunk share the second step
    second = pair.ours.step([(sequences[0], PROMPT[13:]), (sequences[1], [prompts[1][13]])])
    third = pair.ours.step([(sequences[1], prompts[1][14:]), (sequences[2], prompts[2][13:])])
    computed = [(first[0], second[0]), (first[1], second[1], third[0]), (first[2], third[1])]
    for prompt, parts in zip(prompts, computed):
        theirs = pair.their_logits(prompt)
        close(parts[0], theirs[:13])
        close(parts[-1][-1], theirs[-1])


@pytest.mark.parametrize("cached", [4, 16, 40])
def test_a_prefix_already_in_the_cache_gives_the_same_logits(pair, close, new_sequence, cached):
    owner, guest = new_sequence(), new_sequence()
    pair.ours.step([(owner, PROMPT)])
    guest.tokens, guest.blocks = PROMPT[:cached], owner.blocks[: cached // 4]
    (ours,) = pair.ours.step([(guest, PROMPT[cached:])])
    close(ours, pair.their_logits(PROMPT)[cached:])


def test_only_asked_rows_are_computed_and_none_may_be_asked(make_pair, close):
    import torch

    from paged_backend.batch import Batch
    from paged_backend.sequence_slice import SequenceSlice

    pair = make_pair(*CASES["llama"])
    theirs = pair.their_logits(PROMPT)
    for rows in ([], [40], [3, 17]):
        batch = Batch.build([SequenceSlice(PROMPT, 0, torch.arange(1, 12).numpy(), rows)], 4)
        ours = pair.ours.decoder.forward(
            batch.input_ids, batch.positions, batch.attention, batch.logit_rows, pair.ours.caches
        )
        assert ours.shape == (len(rows), 300)
        if rows:
            close(torch.from_numpy(ours), theirs[rows])


@pytest.fixture(scope="module")
def windowed(make_pair):
    return make_pair(
        hf.MistralForCausalLM,
        hf.MistralConfig(**{**SMALL, "max_position_embeddings": 512}, sliding_window=32),
    )


@pytest.mark.parametrize("size", [7, 31, 32, 33, 100])
def test_chunks_around_the_window_equal_the_dense_model(windowed, close, size):
    # litgpt #2182, executorch PR #20346 (chunk longer than the window), vLLM #48435, vllm #49795
    prompt = PROMPT * 2 + PROMPT[:18]
    chunks = [size] * (100 // size) + ([100 % size] if 100 % size else [])
    close(windowed.ours.logits(prompt, chunks), windowed.their_logits(prompt))


def test_decoding_three_windows_with_passed_blocks_given_back(windowed, new_sequence):
    # mlxcel #678: wrong tokens once the window slides; passed blocks become the null block, full of NaN
    sequence, new, tokens = new_sequence(), PROMPT, []
    for _ in range(96):
        (logits,) = windowed.ours.step([(sequence, new)])
        new = [int(logits[-1].argmax())]
        tokens += new
        passed = max(0, len(sequence.tokens) + 1 - 32) // 4
        sequence.blocks[:passed] = [0] * passed
    assert sum(block != 0 for block in sequence.blocks) <= 32 // 4 + 1
    assert tokens == windowed.their_greedy(PROMPT, 96)


@pytest.fixture(scope="module", params=["llama 3 rope", "gemma2", "qwen3 bias, window in layer 0"])
def property_pair(request, make_pair):
    pair = make_pair(*CASES[request.param])
    return pair, pair.their_logits(PROMPT)


@settings(max_examples=25)
@given(cuts=st.sets(st.integers(1, 40)), cached=st.integers(0, 10))
def test_any_split_after_any_prefix_hit_gives_the_same_logits(
    property_pair, close, new_sequence, cuts, cached
):
    # vLLM PR #36580, nano-vllm #212, transformers #43082, #45943: wrong positions or slots of chunks
    pair, theirs = property_pair
    free = list(pair.ours.free)
    owner, sequence = new_sequence(), new_sequence()
    if cached:
        pair.ours.step([(owner, PROMPT[: cached * 4])])
        sequence.tokens, sequence.blocks = PROMPT[: cached * 4], list(owner.blocks)
    edges = [cached * 4, *sorted(c for c in cuts if c > cached * 4), len(PROMPT)]
    for start, stop in itertools.pairwise(edges):
        (ours,) = pair.ours.step([(sequence, PROMPT[start:stop])])
        close(ours, theirs[start:stop])
    pair.ours.free = free


def test_longrope_serves_short_sequences_with_the_short_factors_when_max_model_len_is_short(make_pair, close):
    pair = make_pair(*CASES["phi3 longrope, long"], max_model_len=16)
    close(pair.ours.logits(PROMPT[:16], [3, 13]), pair.their_logits(PROMPT[:16]))


def test_longrope_choice_does_not_depend_on_chunking_or_length(make_pair, close):
    pair = make_pair(*CASES["phi3 longrope, long"])
    close(pair.ours.logits(PROMPT[:10]), pair.ours.logits(PROMPT, [10, 31])[:10])


def test_text_part_of_a_multimodal_gemma3_checkpoint(make_pair, close):
    text = dict(GEMMA, sliding_window=7, layer_types=["sliding_attention", "full_attention"])
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    pair = make_pair(hf.Gemma3ForConditionalGeneration, config)
    close(pair.ours.logits(PROMPT, [30, 11]), pair.their_logits(PROMPT))


OLD_STYLE = {
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
    },
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "phi3": {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "rope_scaling": dict(LONGROPE),
    },
    "gemma3_text": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
        "sliding_window": 7,
        "query_pre_attn_scalar": 40,
    },
}


@pytest.mark.parametrize("model_type", list(OLD_STYLE))
def test_old_and_new_rope_settings_give_the_same_spec(model_type):
    old = {**PHI, "model_type": model_type, **OLD_STYLE[model_type]}
    new = hf.AutoConfig.for_model(**old).to_dict()
    assert "rope_theta" not in new
    assert spec_from_config(old) == spec_from_config({**new, "architectures": None})


def test_the_first_name_of_longrope_is_understood():
    old = {**PHI, "model_type": "phi3", **OLD_STYLE["phi3"]}
    su = {**old["rope_scaling"], "rope_type": None, "type": "su"}
    assert spec_from_config({**old, "rope_scaling": su}) == spec_from_config(old)


@pytest.mark.parametrize("name", supported_architectures())
def test_defaults_are_those_of_transformers(name):
    """A file may leave out what equals the default of the config class."""
    config_class = getattr(
        hf, name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") + "Config", None
    )
    if config_class is None or name.startswith("Gemma3"):
        config_class = hf.Gemma3TextConfig
    full = {**config_class().to_dict(), "architectures": [name]}
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert spec_from_config(
        {"architectures": [name], **{key: full[key] for key in needed}}
    ) == spec_from_config(full)


def test_unknown_architecture_names_it_and_the_supported_ones():
    with pytest.raises(
        UnsupportedModelError, match=r"'MambaForCausalLM' is not supported; .*LlamaForCausalLM"
    ):
        spec_from_config({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type 'proportional'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "rotary dimension 15"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ],
)
def test_an_unsupported_setting_is_named(change, named):
    with pytest.raises(UnsupportedModelError, match=named):
        spec_from_config({**SMALL, "architectures": ["LlamaForCausalLM"], **change})


def test_a_window_that_the_layers_ask_for_and_the_config_switches_off_is_refused():
    # vllm #49795: layer types and sliding_window disagree
    config = {
        **SMALL,
        "model_type": "qwen2",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    }
    with pytest.raises(UnsupportedModelError, match="sliding_window is not set or not used"):
        spec_from_config(config)
    config = {**SMALL, "model_type": "mistral", "layer_types": ["full_attention"] * 2, "sliding_window": 4}
    with pytest.raises(UnsupportedModelError, match="contradicts sliding_window 4"):
        spec_from_config(config)


def test_token_ids_are_read_as_one_or_many():
    base = {**SMALL, "model_type": "llama"}
    assert spec_from_config({**base, "eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
    assert spec_from_config({**base, "eos_token_id": 7}).eos_token_ids == (7,)
    assert spec_from_config({**base, "eos_token_id": None}).eos_token_ids == ()
