"""A script written for vLLM runs when its import is changed, or is told by name what it cannot have."""

from __future__ import annotations

import pytest
import torch

from paged_backend import LLM, SamplingParams
from paged_backend.config import EngineConfig
from paged_backend.vllm_options import own_options

CONSTRUCTOR = {
    # option: (values that are taken, values that are refused)
    "gpu_memory_utilization": ([0.9, 1, 0.1], [0, 1.5, "0.9"]),
    "enforce_eager": ([True, False], ["x"]),
    "disable_log_stats": ([True, False], [1]),
    "tensor_parallel_size": ([1], [2, True]),
    "pipeline_parallel_size": ([1], [2]),
    "data_parallel_size": ([1], [2]),
    "trust_remote_code": ([False], [True]),
    "swap_space": ([4, 0.5], [-1]),
    "enable_chunked_prefill": ([True, False], [1]),
    "tokenizer_mode": (["auto"], ["slow", "mistral"]),
    "dtype": (["auto", "float32", "float", torch.float32, "bfloat16", torch.bfloat16], ["fp8"]),
    "quantization": ([None, "int8"], ["awq", "fp8"]),
    "kv_cache_dtype": (["auto", "bfloat16"], ["fp8"]),
    "revision": ([None, "main"], ["v2"]),
    "tokenizer_revision": ([None, "main"], ["v2"]),
    "max_num_batched_tokens": ([None, 2048], [0]),
    "max_num_seqs": ([None, 16], [0]),
    "max_model_len": ([None, 64, -1, "auto"], [0]),
    "block_size": ([None, 16], [12]),
    "enable_prefix_caching": ([None, True, False], []),
    "seed": ([0, None], []),
    "kv_cache_memory_bytes": ([1 << 24], [0]),
    "num_gpu_blocks_override": ([64], [1]),
    "load_format": (["auto"], ["tensorizer"]),
    "distributed_executor_backend": ([None, "mp"], ["ray"]),
    "cpu_offload_gb": ([0], [4]),
    "skip_tokenizer_init": ([False], [True]),
    "max_logprobs": ([20], ["x"]),
    "compilation_config": ([None, 3, {"level": 3}], []),
    "limit_mm_per_prompt": ([{"image": 0}], [1]),
    "enable_lora": ([False], [True]),
    "speculative_config": ([None], [{"model": "m"}]),
    "generation_config": (["auto"], ["vllm"]),
    "override_generation_config": ([None, {}], [{"temperature": 0}]),
    "hf_overrides": ([None, {}], [{"a": 1}]),
    "download_dir": ([None], ["/x"]),
    "runner": (["auto", "generate"], ["pooling"]),
    "task": (["auto", "generate"], ["embed"]),
    "logprobs_mode": (["raw_logprobs"], ["processed_logits"]),
    "scheduling_policy": (["fcfs", "priority"], ["x"]),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_options_of_the_constructor(name):
    taken, refused = CONSTRUCTOR[name]
    for value in taken:
        EngineConfig.from_options("m", **own_options({name: value}))
    for value in refused:
        own = {"kv_cache_memory_bytes": "kv_cache_memory", "num_gpu_blocks_override": "num_blocks"}.get(
            name, name
        )
        with pytest.raises(ValueError, match=own):
            EngineConfig.from_options("m", **own_options({name: value}))


def test_what_has_a_meaning_here_keeps_it():
    given = own_options(
        {"kv_cache_memory_bytes": 1 << 24, "dtype": torch.bfloat16, "max_model_len": -1, "max_num_seqs": None}
    )
    assert given == {"kv_cache_memory": 1 << 24, "dtype": "bfloat16", "max_model_len": None}


def test_a_small_share_of_a_gpu_is_not_taken_for_most_of_it():
    own_options({"device": "cuda", "gpu_memory_utilization": 0.9})
    with pytest.raises(ValueError, match="kv_cache_memory"):
        own_options({"device": "cuda", "gpu_memory_utilization": 0.3})


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(TypeError, match="gpu_memory_utilisation"):
        LLM("demo", gpu_memory_utilisation=0.9)


SAMPLING = {
    "best_of": ([None, 1], [2]),
    "logprobs": ([-1, 0, 5], [-2]),
    "prompt_logprobs": ([-1, 0, 5], [-2]),
    "truncate_prompt_tokens": ([None], [5]),
    "guided_decoding": ([None, {"regex": "a"}], [{"json": {}, "regex": "a"}]),
    "detokenize": ([True, False], []),
    "spaces_between_special_tokens": ([True, False], [1]),
    "flat_logprobs": ([False], [True]),
    "extra_args": ([None, {}], [{"a": 1}]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1.0], [0.5]),
    "early_stopping": ([False], [True]),
    "thinking_token_budget": ([None, -1], [5]),
    "logprob_token_ids": ([None, []], [[1]]),
    "repetition_detection": ([None], [{"min_count": 2}]),
    "stream_interval": ([None, 1], ["x"]),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_options_of_sampling_params(name):
    taken, refused = SAMPLING[name]
    for value in taken:
        SamplingParams(**{name: value})
    for value in refused:
        with pytest.raises(ValueError, match="structured_outputs" if name == "guided_decoding" else name):
            SamplingParams(**{name: value})


def test_the_old_name_of_structured_outputs_says_the_same():
    assert SamplingParams(guided_decoding={"regex": "a+"}) == SamplingParams(
        structured_outputs={"regex": "a+"}
    )
    with pytest.raises(ValueError, match="guided_decoding"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "b"})


class Bar:
    """As much of tqdm as is asked of it."""

    made = 0

    def __init__(self, total, **options):
        type(self).made += 1
        self.left = total

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def update(self, count):
        self.left -= count

    def set_postfix_str(self, text, refresh):
        pass


def test_a_script_of_vllms_runs(tiny_model):
    llm = LLM(
        model=tiny_model, tokenizer_mode="auto", tensor_parallel_size=1, gpu_memory_utilization=0.9, enforce_eager=True,
        swap_space=4, disable_log_stats=True, enable_chunked_prefill=True, trust_remote_code=False, seed=0,
        max_num_seqs=8, max_model_len=128, dtype="auto", revision=None,
    )  # fmt: skip
    with llm:
        params = SamplingParams(n=2, best_of=2, temperature=0, top_p=1.0, max_tokens=3, logprobs=-1)
        (output,) = llm.generate(["the fox"], params, use_tqdm=Bar, lora_request=None)
        assert Bar.made == 1
        assert output.outputs[0].token_ids == output.outputs[1].token_ids
        assert all(len(entry) == 300 for entry in output.outputs[0].logprobs)
        assert output.lora_request is output.outputs[0].lora_request is output.encoder_prompt is None
        again = llm.generate(
            prompt_token_ids=[output.prompt_token_ids], sampling_params=params, use_tqdm=False
        )
        assert again[0].outputs[0].token_ids == output.outputs[0].token_ids
        chat = [{"role": "user", "content": "hi"}]
        llm.chat(chat, SamplingParams(max_tokens=1), False, None, chat_template_content_format="auto")
        assert llm.get_default_sampling_params().temperature is not None
        for call in (llm.generate, llm.chat):
            given = ["a"] if call == llm.generate else chat
            with pytest.raises(ValueError, match="lora_request"):
                call(given, lora_request=object())
            with pytest.raises(TypeError, match="lora"):
                call(given, lora=None)
        with pytest.raises(ValueError, match="2 priorities"):
            llm.generate(["a"], priority=[1, 2])
        with pytest.raises(TypeError, match="prompts or prompt_token_ids"):
            llm.generate()
