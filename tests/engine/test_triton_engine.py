"""The engine on the Triton path, in the interpreter: exactness, chunks, prefix hits, preemption, forks.

A tiny model keeps it fast; what it generates must be what the reference kernels generate, which other tests hold
against transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from paged_backend import LLM, SamplingParams

PROMPTS = [[5, 6, 7] * 6, [9, 8], [3] * 20, [5, 6, 7] * 5 + [40, 41]]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Llama of one layer, two heads that share a key head, vocabulary 60; no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder: Path = tmp_path_factory.mktemp("one")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # logits far enough apart
    model.save_pretrained(folder)
    return str(folder)


def generate(
    model: str, prompts: list[list[int]], params: Any = GREEDY, **options: Any
) -> tuple[list[Any], Any]:
    """Outputs and, after leaving nothing behind, the engine's statistics."""
    with LLM(model, **{"num_blocks": 40, "block_size": 4, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.engine.stats()
        llm.engine.check()
        assert stats.kv_blocks_used == 0
    return outputs, stats


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(one_layer: str) -> list[list[list[int]]]:
    return tokens(generate(one_layer, PROMPTS, kernels="reference")[0])


@pytest.mark.parametrize("prompts", [range(4), range(1)])
def test_tokens_equal_the_reference_alone_and_together(
    one_layer: str, expected: list[list[list[int]]], prompts: range
) -> None:
    outputs, _ = generate(one_layer, [PROMPTS[i] for i in prompts], kernels="triton")
    assert tokens(outputs) == [expected[i] for i in prompts]


def test_chunks_of_a_few_tokens_give_the_same(one_layer: str, expected: list[list[list[int]]]) -> None:
    outputs, _ = generate(one_layer, PROMPTS[:2], kernels="triton", max_num_batched_tokens=11)
    assert tokens(outputs) == expected[:2]


def test_a_prefix_hit_gives_the_same(one_layer: str, expected: list[list[list[int]]]) -> None:
    with LLM(one_layer, kernels="triton", num_blocks=40, block_size=4) as llm:
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        outputs = llm.generate([PROMPTS[3], PROMPTS[0]], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [12, 16]
    assert tokens(outputs) == [expected[3], expected[0]]


def test_a_pool_that_must_preempt_gives_the_same(one_layer: str) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=7, detokenize=False
    )  # its length is not known beforehand
    prompts = [PROMPTS[1], [9, 7], [4, 4, 4]]

    def run(kernels: str) -> tuple[list[list[list[int]]], int]:
        with LLM(one_layer, kernels=kernels, num_blocks=6, block_size=4, max_model_len=16) as llm:
            for _ in range(200):
                llm.engine._core.scheduler.lengths.add(1)  # admission guesses too low
            outputs = llm.generate(prompts, params, use_tqdm=False)
            preemptions = llm.engine.stats().num_preemptions
            llm.engine.check()
        return tokens(outputs), preemptions

    ours, preemptions = run("triton")
    assert preemptions > 0
    assert ours == run("reference")[0]


def test_keys_and_values_of_8_bits_give_what_they_give_with_the_reference(one_layer: str) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=3, detokenize=False, ignore_eos=True)
    options = {"kv_cache_dtype": "int8", "num_blocks": 14, "block_size": 4, "max_model_len": 32}
    ours, _ = generate(one_layer, [*PROMPTS[:2], PROMPTS[0]], params, kernels="triton", **options)
    theirs, _ = generate(one_layer, [*PROMPTS[:2], PROMPTS[0]], params, kernels="reference", **options)
    assert tokens(ours) == tokens(theirs)


def test_samples_that_fork_share_and_then_copy_their_tail(one_layer: str) -> None:
    params = SamplingParams(
        n=3, temperature=1.0, top_p=0.95, seed=4, max_tokens=3, detokenize=False, ignore_eos=True
    )
    ours, _ = generate(one_layer, [PROMPTS[0]], params, kernels="triton")
    theirs, _ = generate(one_layer, [PROMPTS[0]], params, kernels="reference")
    assert tokens(ours) == tokens(theirs)
    assert len({tuple(sample.token_ids) for sample in ours[0].outputs}) > 1


def test_log_probabilities_and_penalties_go_through_the_host(one_layer: str) -> None:
    params = [
        SamplingParams(
            temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1, detokenize=False, ignore_eos=True
        ),
        SamplingParams(
            temperature=0, max_tokens=2, repetition_penalty=1.3, detokenize=False, ignore_eos=True
        ),
    ]
    ours, _ = generate(one_layer, [PROMPTS[1], PROMPTS[1]], params, kernels="triton")
    theirs, _ = generate(one_layer, [PROMPTS[1], PROMPTS[1]], params, kernels="reference")
    assert tokens(ours) == tokens(theirs)
    mine, other = ours[0].outputs[0], theirs[0].outputs[0]
    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-4)


def test_penalties_are_applied_on_the_device_to_hits_forks_and_what_was_just_drawn(one_layer: str) -> None:
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2}
    fixed = {"detokenize": False, "ignore_eos": True, "max_tokens": 5}
    params = [
        SamplingParams(temperature=0, **penalties, **fixed),
        SamplingParams(temperature=0, **fixed),
        SamplingParams(temperature=1.0, top_p=0.9, seed=3, n=2, **penalties, **fixed),
    ]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]  # the last begins as the first does
    theirs, _ = generate(one_layer, prompts, params, kernels="reference")
    with LLM(one_layer, kernels="triton", num_blocks=40, block_size=4) as llm:
        core: Any = llm.engine._core
        sample, drawn = core.runner.sampler.sample, []
        core.runner.sampler.sample = lambda logits, rows: drawn.extend(rows) or sample(logits, rows)
        ours = llm.generate(prompts, params, use_tqdm=False)
    assert tokens(ours) == tokens(theirs)
    assert ours[2].num_cached_tokens > 0
    assert not drawn  # nothing went through the host


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_run(one_layer: str, quantization: str) -> None:
    outputs, _ = generate(one_layer, PROMPTS[1:2], kernels="triton", quantization=quantization)
    assert len(outputs[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("family", ["GPT2", "GptOss"])
def test_modules_of_transformers_give_what_they_give_with_the_reference(family: str, tmp_path: Path) -> None:
    # learned positions; a mixture of experts with attention sinks and windows in every other layer
    import torch
    import transformers

    options = {
        "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
        "GptOss": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 8,
            "max_position_embeddings": 64,
        },
    }[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=60, bos_token_id=1, eos_token_id=2, **options
    )
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    module.save_pretrained(tmp_path)
    prompts = [PROMPTS[0][:14], PROMPTS[1]]
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=4, ignore_eos=True, detokenize=False)
    theirs, _ = generate(str(tmp_path), prompts, params, kernels="reference")
    ours, _ = generate(str(tmp_path), prompts, params, kernels="triton")
    assert tokens(ours) == tokens(theirs)
    assert len({token for samples in tokens(ours) for token in samples[0]}) > 2


def test_a_gpu_that_is_not_there_is_named(one_layer: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"needs a GPU.*device='cpu'"):
        LLM(one_layer, device="cuda")


def test_options_that_do_not_go_together_are_refused() -> None:
    from paged_backend import EngineConfig

    with pytest.raises(ValueError, match="CPU only"):
        EngineConfig("x", device="cuda", kernels="c")
    with pytest.raises(ValueError, match="float16 needs device='cuda'"):
        EngineConfig("x", dtype="float16")
    assert EngineConfig("x", device="cuda").activation_dtype == "bfloat16"
    assert EngineConfig("x", device="cuda", quantization="int8").stored_kv_dtype == "bfloat16"
    assert EngineConfig("x", device="cuda", dtype="float16").stored_kv_dtype == "float16"
