"""Every option of GenerationConfig that we claim, alone and combined: the engine gives what ``generate`` gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

VOCAB = 101
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "GPT2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition_penalty below one": {"repetition_penalty": 0.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(20, 60)] + [[70, 71], [5, 6, 7]]},
    "sequence_bias": {"sequence_bias": [[[9], 3.0], [[10, 11], -5.0], [[44], 2.5]]},
    "suppress_tokens": {"suppress_tokens": list(range(30, 90))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(95))},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(40, 70))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(40, 70))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 7},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "eos_token_id": {"eos_token_id": 33},
    "several eos_token_id": {"eos_token_id": [33, 40, 41, 42, 43, 77]},
    "eos beyond the vocabulary": {"eos_token_id": [33, 5000]},
    "max_length": {"max_length": 29},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.5)},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "max_time": {"max_time": 1000.0, "eos_token_id": 33},
    "processors together": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "suppress_tokens": [3, 4, 5],
        "bad_words_ids": [[50], [60, 61]],
        "exponential_decay_length_penalty": (5, 1.2),
        "eos_token_id": [7, 9],
    },
}
BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4},
    "several sequences": {"num_beams": 4, "num_return_sequences": 3},
    "length_penalty": {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": [5, 6, 7, 8, 9]},
    "negative length_penalty": {"num_beams": 3, "length_penalty": -1.0, "eos_token_id": list(range(5, 30))},
    "early_stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(5, 30))},
    "early_stopping never": {"num_beams": 3, "early_stopping": "never", "eos_token_id": list(range(5, 30))},
    "beams with processors": {
        "num_beams": 3,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "eos_token_id": [5, 6],
        "bad_words_ids": [[50], [60, 61]],
    },
    "beams with a forced end": {"num_beams": 2, "forced_eos_token_id": 5, "eos_token_id": 5},
    "beams and pad 0": {"num_beams": 2, "eos_token_id": [5, 44, 45, 46], "pad_token_id": 0},
    "beams and pad": {"num_beams": 2, "eos_token_id": [5, 44, 45, 46], "pad_token_id": 2},
}


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, make_pair: Any) -> Any:
    return make_pair(request.param, MODELS[request.param])


def fill(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What every call here needs: greedy, a pad token, a length unless the case gives one."""
    base = {"do_sample": False, "pad_token_id": 0, **more}
    if "max_length" not in options:
        base["max_new_tokens"] = 14
    return {**base, **options}


@pytest.mark.parametrize("name", [*OPTIONS, *BEAMS])
def test_option_in_a_padded_batch(name: str, pair: Any, batch: Any) -> None:
    options = fill(OPTIONS.get(name) or BEAMS.get(name) or {})
    pair.check(**batch(4, 11, 19), **options)


@pytest.mark.parametrize("name", [*OPTIONS, *BEAMS])
def test_option_for_one_prompt(name: str, pair: Any, batch: Any) -> None:
    pair.check(batch(7, seed=3)["input_ids"], **fill(OPTIONS.get(name) or BEAMS.get(name) or {}))


@pytest.mark.parametrize("seed", range(8))
def test_random_combinations(seed: int, pair: Any, batch: Any) -> None:
    choose = random.Random(seed)
    options: dict[str, Any] = {}
    for name in choose.sample(sorted(OPTIONS), 4):
        options.update(OPTIONS[name])
    if seed % 3 == 0:
        options.update(num_beams=choose.choice((2, 3)), early_stopping=choose.choice((True, False, "never")))
        options.pop("cache_implementation", None)
    lengths = [choose.randint(1, 20) for _ in range(choose.randint(1, 3))]
    options = fill(options)
    if options.get("max_length", 99) <= max(lengths):
        options["max_length"] = max(lengths) + 5
    if "max_length" in options:
        options.pop("max_new_tokens", None)
    pair.check(**batch(*lengths, seed=seed), **options)


def test_a_generation_config_object(pair: Any, batch: Any) -> None:
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.7, do_sample=False, pad_token_id=0)
    pair.check(**batch(6, 9), generation_config=config)


def test_the_models_generation_config_is_the_default(pair: Any, batch: Any) -> None:
    """Explicit over generation config over transformers' defaults; nothing that is said is lost."""
    for model in (pair.theirs, pair.ours):
        model.generation_config.update(
            repetition_penalty=1.6, max_new_tokens=11, eos_token_id=[33, 34], pad_token_id=0
        )
    try:
        plain = pair.check(**batch(6, 9))
        other = pair.check(**batch(6, 9), repetition_penalty=1.0, max_new_tokens=5, eos_token_id=77)
        assert plain.shape != other.shape
    finally:
        for model in (pair.theirs, pair.ours):
            model.generation_config.update(
                repetition_penalty=None, max_new_tokens=None, eos_token_id=None, pad_token_id=None
            )


def test_the_default_length_is_twenty_tokens(pair: Any, batch: Any) -> None:
    assert pair.check(**batch(6), do_sample=False).shape == (1, 26)


def test_rows_that_end_early_are_padded(pair: Any, batch: Any) -> None:
    ids = pair.check(**batch(3, 9, 14, 5), **fill({"eos_token_id": list(range(20, 50)), "pad_token_id": 99}))
    assert (ids[:, 14:] == 99).any()


def test_the_mask_is_found_from_the_padding(pair: Any, batch: Any) -> None:
    pair.check(batch(3, 9)["input_ids"], **fill({"eos_token_id": 5}))


def test_padding_with_the_end_token_changes_nothing(pair: Any, batch: Any) -> None:
    """pad == eos, unequal prompts: the batch gives what each prompt gives alone."""
    inputs = batch(3, 9, 14, pad=5)
    together = pair.check(**inputs, **fill({"eos_token_id": 5, "pad_token_id": 5}))
    for row, length in enumerate((3, 9, 14)):
        alone = pair.run(inputs["input_ids"][row : row + 1, -length:], **fill({"eos_token_id": 5}))
        new = alone[0, length:].tolist()
        assert together[row, 14 : 14 + len(new)].tolist() == new


def test_holes_in_the_mask_are_honoured(pair: Any, batch: Any) -> None:
    inputs = batch(12, 12)
    inputs["attention_mask"][0, 4:7] = 0
    pair.check(**inputs, **fill({"repetition_penalty": 1.3}))


@pytest.mark.parametrize("beams", [1, 3])
def test_prefix_allowed_tokens_fn(beams: int, pair: Any, batch: Any) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        last = int(ids[-1])
        return [(last * 7 + row * 13 + i * 5) % VOCAB for i in range(25)]

    pair.check(**batch(4, 9), **fill({"prefix_allowed_tokens_fn": allowed, "num_beams": beams}))


@pytest.mark.parametrize("rows", [1, 3])
def test_scores_and_logits_of_each_step(rows: int, pair: Any, batch: Any) -> None:
    options = fill(
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "output_scores": True, "output_logits": True}
    )
    inputs = batch(*(5, 8, 12)[:rows])
    expected = pair.theirs.generate(**inputs, **options, return_dict_in_generate=True)
    got = pair.run(**inputs, **options, return_dict_in_generate=True)
    assert got.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert len(mine) == len(theirs) == 14
        for a, b in zip(mine, theirs):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    ours, their_scores = (
        model.compute_transition_scores(out.sequences, out.scores)
        for model, out in ((pair.theirs, got), (pair.theirs, expected))
    )
    torch.testing.assert_close(ours, their_scores, rtol=1e-4, atol=1e-4)


def test_beam_indices(pair: Any, batch: Any) -> None:
    options = fill({"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(5, 30))})
    inputs = batch(5, 8)
    expected = pair.theirs.generate(**inputs, **options, return_dict_in_generate=True)
    got = pair.run(**inputs, **options, return_dict_in_generate=True)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.beam_indices.tolist() == expected.beam_indices.tolist()


def test_no_input_starts_from_the_begin_token(pair: Any) -> None:
    pair.check(None, bos_token_id=1, **fill({}))


# --- sampling: not transformers' random numbers, but exactly its distribution ---------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 7},
    "default top_k of 50": {},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "typical_p": {"typical_p": 0.7, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.05, "top_k": 0},
    "top_h": {"top_h": 0.4, "top_k": 0},
    "all of them": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "with a penalty": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.8},
    "with processors": {
        "temperature": 0.8,
        "top_k": 20,
        "suppress_tokens": list(range(40)),
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", SAMPLING)
def test_samples_follow_transformers_distribution(name: str, make_pair: Any, batch: Any) -> None:
    pair = make_pair("Llama", MODELS["Llama"])
    inputs, count = batch(6), 600
    torch.manual_seed(1)
    options = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 1, **SAMPLING[name]}
    scores = pair.theirs.generate(
        **inputs, **options, output_scores=True, return_dict_in_generate=True
    ).scores[0]
    expected = scores[0].softmax(-1)
    got = torch.zeros(VOCAB)
    for _ in range(3):
        ids = pair.run(**inputs, **options, num_return_sequences=count // 3)
        got += torch.bincount(ids[:, -1], minlength=VOCAB) / count
    assert not (got > 0)[expected == 0].any(), "a token outside of the truncated distribution was drawn"
    support = int((expected > 0).sum())
    # the mean total variation of n draws is about sqrt(k / (2 pi n)) at most
    assert float((got - expected).abs().sum() / 2) < 1.5 * (support / (2 * 3.14159 * count)) ** 0.5 + 0.02


def test_sampling_follows_the_seed_of_torch(pair: Any, batch: Any) -> None:
    options = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 12, "num_return_sequences": 3}
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(pair.run(**batch(4, 9), **options))
    assert runs[0].tolist() == runs[1].tolist() != runs[2].tolist()
    assert runs[0].shape == (6, 21)
    assert len({tuple(row) for row in runs[0].tolist()}) == 6


def test_scores_of_a_sampled_run_are_those_of_its_tokens(pair: Any, batch: Any) -> None:
    options = {"do_sample": True, "pad_token_id": 0, "max_new_tokens": 8, "temperature": 0.7, "top_k": 5}
    out = pair.run(
        **batch(4, 9), **options, num_return_sequences=2, output_scores=True, return_dict_in_generate=True
    )
    assert len(out.scores) == 8
    for step, scores in enumerate(out.scores):
        assert scores.shape == (4, VOCAB)
        assert (torch.isfinite(scores).sum(-1) == 5).all()
        assert torch.isfinite(scores.gather(1, out.sequences[:, 9 + step, None])).all()


# --- arguments that are refused, as transformers refuses them -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_new_tokens": 0}, ValueError),
        ({"num_return_sequences": 2}, ValueError),
        ({"max_new_tokens": 4, "tempratur": 1.0}, ValueError),
        ({"max_length": 3}, ValueError),
        ({"stop_strings": ["x"], "max_new_tokens": 4}, ValueError),
        ({"num_beams": 2, "num_return_sequences": 3, "max_new_tokens": 4}, ValueError),
    ],
)
def test_the_same_errors(options: dict[str, Any], error: type[Exception], pair: Any, batch: Any) -> None:
    for model in (pair.theirs, pair.ours):
        with pytest.raises(error):
            model.generate(**batch(7), do_sample=False, pad_token_id=0, **options)
