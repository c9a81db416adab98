"""Every architecture that we claim, against ``transformers.generate``, and those that must be refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from paged_backend import get_engine
from paged_backend.adapters.huggingface import accelerate
from paged_backend.errors import UnsupportedModelError

VOCAB = 101
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

RUNS: dict[str, dict[str, Any]] = {
    "Llama": BASE,
    "Mistral": {**BASE, "sliding_window": 6},
    "Qwen2": BASE,
    "Qwen3": {**BASE, "head_dim": 8},
    "Gemma": {**BASE, "head_dim": 8},
    "Gemma2": {**BASE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "Gemma3": {**BASE, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Phi3": {**BASE, "sliding_window": None},
    "GPT2": GPT,
    "GPTJ": {**GPT, "rotary_dim": 4},
    "GPTBigCode": GPT,
    "GPTNeoX": {k: v for k, v in BASE.items() if k != "num_key_value_heads"},
    "OPT": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "Starcoder2": {**BASE, "sliding_window": 5},
    "StableLm": BASE,
    "Persimmon": BASE,
    "Phi": BASE,
    "Phimoe": {**BASE, "num_local_experts": 4},
    "Mixtral": {**BASE, "num_local_experts": 4, "sliding_window": 6},
    "Ministral": {**BASE, **MIXED, "head_dim": 8},
    "Qwen2Moe": {**BASE, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**BASE, **EXPERTS, "num_experts": 4, "head_dim": 8},
    "Olmo": BASE,
    "Olmo2": BASE,
    "Olmo3": {**BASE, **MIXED},
    "Olmoe": {**BASE, "num_experts": 4, "num_experts_per_tok": 2},
    "FlexOlmo": {**BASE, "num_experts": 4, "num_experts_per_tok": 2},
    "Granite": BASE,
    "GraniteMoe": {**BASE, "num_local_experts": 4},
    "GraniteMoeShared": {**BASE, "num_local_experts": 4, "shared_intermediate_size": 16},
    "Cohere": BASE,
    "Cohere2": {**BASE, **MIXED},
    "GptOss": {
        **BASE,
        **MIXED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Glm": {**BASE, "head_dim": 8},
    "Glm4": {**BASE, "head_dim": 8},
    "Glm4Moe": {
        **BASE,
        **EXPERTS,
        "head_dim": 8,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "Nemotron": BASE,
    "DeepseekV2": {**BASE, **DEEPSEEK, "head_dim": 4},
    "DeepseekV3": {**BASE, **DEEPSEEK},
    "SmolLM3": BASE,
    "Helium": {**BASE, "head_dim": 8},
    "Ernie4_5": BASE,
    "Ernie4_5_Moe": {
        **BASE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
    },
    "HunYuanDenseV1": {**BASE, "head_dim": 8},
    "HunYuanMoEV1": {**BASE, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "Exaone4": {**BASE, **MIXED},
    "Arcee": BASE,
    "SeedOss": {**BASE, "head_dim": 8},
    "JetMoe": {**BASE, "kv_channels": 8, "num_local_experts": 4},
    "Apertus": {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
"""Class name without ForCausalLM -> fields of its config."""

ALWAYS = ("Llama", "Gemma2", "GPT2", "OPT", "Mixtral", "Olmo3", "GptOss", "DeepseekV3")
RARE = (
    "Apertus",
    "Arcee",
    "DeepseekV2",
    "Ernie4_5",
    "Exaone4",
    "FlexOlmo",
    "GPTBigCode",
    "Glm",
    "Glm4Moe",
    "GraniteMoe",
    "GraniteMoeShared",
    "Helium",
    "HunYuanDenseV1",
    "HunYuanMoEV1",
    "JetMoe",
    "Ministral",
    "Olmo",
    "Persimmon",
    "Phimoe",
    "SeedOss",
    "SmolLM3",
)


def slow(names: Any) -> list[Any]:
    """All architectures, those in ``names`` marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in names else name for name in RUNS]


MOST, SOME = slow(RARE), slow([name for name in RUNS if name not in ALWAYS])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}, "position_ids"),
    "Falcon": (
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "interface",
    ),
    "Bloom": ({"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "position_ids"),
    "Mpt": (
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
        "position_ids",
    ),
    "GPTNeo": (
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "interface",
    ),
    "Llama4": (
        {
            **BASE,
            **EXPERTS,
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
        },
        "causal or sliding window",
    ),
    "Lfm2": ({**BASE, "layer_types": ["conv", "full_attention"]}, "state outside of attention"),
    "MiniMax": (
        {**BASE, "num_local_experts": 4, "layer_types": ["full_attention", "linear_attention"]},
        "state outside of attention|attention",
    ),
}
"""... and a word of the error that says why it cannot run."""


@pytest.fixture
def claim(request: pytest.FixtureRequest) -> Any:
    """Tell the table what a passing test shows."""

    def tell(name: str, what: str, result: str = "equal") -> None:
        request.node.user_properties.append(
            ("architecture", {"class": name, "claim": what, "result": result})
        )

    return tell


@pytest.mark.parametrize("name", MOST)
def test_greedy_batch_equals_transformers(name: str, make_pair: Any, batch: Any, claim: Any) -> None:
    pair = make_pair(name, RUNS[name])
    claim(name, "greedy")
    claim(name, "class", type(pair.theirs).__name__)
    claim(name, "path", "native" if pair.native else "module")
    pair.check(**batch(3, 9, 17, 30), max_new_tokens=12, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("name", SOME)
def test_penalties_equal_transformers(name: str, make_pair: Any, batch: Any, claim: Any) -> None:
    claim(name, "penalties")
    make_pair(name, RUNS[name]).check(
        **batch(5, 12),
        max_new_tokens=16,
        do_sample=False,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        eos_token_id=[2, 7],
        pad_token_id=0,
    )


@pytest.mark.parametrize("name", SOME)
def test_beam_search_equals_transformers(name: str, make_pair: Any, batch: Any, claim: Any) -> None:
    claim(name, "beams")
    make_pair(name, RUNS[name]).check(
        **batch(6, 11),
        max_new_tokens=8,
        num_beams=3,
        num_return_sequences=2,
        do_sample=False,
        eos_token_id=5,
        pad_token_id=0,
    )


@pytest.mark.parametrize("weights", ["pack", "share"])
@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "GPT2", "Mixtral"])
def test_accelerate_equals_transformers(name: str, weights: str, make_pair: Any, batch: Any) -> None:
    pair = make_pair(name, RUNS[name])
    paged = accelerate(copy.deepcopy(pair.theirs), weights=weights, kernels="reference")
    native = type(paged.engine._core.runner.model).__name__ == "Decoder"
    assert native == (pair.native and weights == "pack")
    options = {**batch(4, 9), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    assert paged.generate(**options).tolist() == pair.theirs.generate(**options).tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_refused(name: str, random_checkpoint: Any, claim: Any) -> None:
    config, why = REFUSED[name]
    claim(name, "greedy", "refused")
    with pytest.raises(UnsupportedModelError, match=why):
        get_engine(str(random_checkpoint(name, config)), kernels="reference")


def test_the_published_table_is_of_these_tests() -> None:
    """docs/architectures.md has a row for each architecture here, and the README says how many there are."""
    root = Path(__file__).parents[2]
    lines = (root / "docs" / "architectures.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.endswith("equal | equal | equal |")]
    names = {row.split("|")[1].strip() for row in rows}
    assert names == {f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM" for name in RUNS}
    assert f"{len(RUNS)} architectures run." in "\n".join(lines)
    assert f"[{len(RUNS)} architectures](docs/architectures.md)" in (root / "README.md").read_text("utf-8")
