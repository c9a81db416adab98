"""Options of vLLM's ``LLM``: a script written for it runs here, or is told which of its options it cannot have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.neutral import FLAG, OBJECT, TEXT, Neutral, label, never, only, without_neutral

_ONE_DEVICE = "is not supported: one device runs the model"
_HUB = "is not supported: download what is wanted and name its folder as the model"
_NO_ADAPTERS = "is not supported: merge LoRA weights into the model"
_TEXT_ONLY = "is not supported: models read and write text only"
_NUMBER = Neutral("must be a number", lambda value: isinstance(value, (int, float)) and value >= 0)

NEUTRAL: Mapping[str, Neutral] = {
    # how it is run, which changes no result
    "enforce_eager": FLAG,
    "swap_space": _NUMBER,
    "enable_chunked_prefill": FLAG,
    "disable_log_stats": FLAG,
    "disable_log_requests": FLAG,
    "enable_log_requests": FLAG,
    "async_scheduling": FLAG,
    "scheduling_policy": only("fcfs", "priority", why="must be 'fcfs' or 'priority', which are one here"),
    "compilation_config": Neutral("must be an object or a number", lambda value: True),
    "cudagraph_capture_sizes": label(list, "a list of sizes"),
    "max_cudagraph_capture_size": _NUMBER,
    "max_seq_len_to_capture": _NUMBER,
    "max_logprobs": label(int, "a number"),
    "max_num_partial_prefills": _NUMBER,
    "max_parallel_loading_workers": _NUMBER,
    "prefix_caching_hash_algo": TEXT,
    "profiler_config": OBJECT,
    "use_v2_block_manager": FLAG,
    "num_scheduler_steps": _NUMBER,
    "disable_custom_all_reduce": FLAG,
    "disable_cascade_attn": FLAG,
    "guided_decoding_backend": TEXT,
    "structured_outputs_config": OBJECT,
    "gpu_memory_utilization": Neutral(
        "must be in (0, 1]; where less of a GPU is to be used, give kv_cache_memory in bytes",
        lambda value: isinstance(value, (int, float)) and 0 < value <= 1,
    ),
    # one of several ways, and this is ours
    "tensor_parallel_size": only(1, why=_ONE_DEVICE),
    "pipeline_parallel_size": only(1, why=_ONE_DEVICE),
    "data_parallel_size": only(1, why=_ONE_DEVICE),
    "enable_expert_parallel": only(False, why=_ONE_DEVICE),
    "distributed_executor_backend": only("mp", "uni", why=_ONE_DEVICE),
    "cpu_offload_gb": only(0, why="is not supported: choose quantization to need less memory"),
    "offload_group_size": only(0, why="is not supported: choose quantization to need less memory"),
    "tokenizer_mode": only("auto", "hf", why="is not supported, but for 'auto'"),
    "skip_tokenizer_init": only(False, why="is not supported: set detokenize=False in SamplingParams"),
    "load_format": only("auto", "safetensors", "gguf", why="is not supported: the format is seen from the files"),
    "config_format": only("auto", "hf", why="is not supported: the format is seen from the files"),
    "runner": only("auto", "generate", why="is not supported: models generate text"),
    "task": only("auto", "generate", why="is not supported: models generate text"),
    "convert": only("auto", "none", why="is not supported: models generate text"),
    "generation_config": only("auto", why="is not supported: give SamplingParams what is to be different"),
    "override_generation_config": never("is not supported: give SamplingParams what is to be different"),
    "logprobs_mode": only("raw_logprobs", why="is not supported: logprobs are those of the model, 'raw_logprobs'"),
    "revision": only("main", why=_HUB),
    "code_revision": only("main", why=_HUB),
    "tokenizer_revision": only("main", why=_HUB),
    "download_dir": never("is not supported: set HF_HOME"),
    "hf_token": never("is not supported: set HF_TOKEN"),
    "hf_overrides": never("is not supported: change the model's config.json"),
    "hf_config_path": never(_HUB),
    "chat_template": never("is not supported: give it to chat()"),
    "enable_lora": only(False, why=_NO_ADAPTERS),
    "max_loras": _NUMBER,
    "max_lora_rank": _NUMBER,
    "speculative_config": never("is not supported: every token is computed by the model itself"),
    "speculative_model": never("is not supported: every token is computed by the model itself"),
    "attention_config": never("is not supported: choose kernels"),
    "attention_backend": never("is not supported: choose kernels"),
    "quantization_config": never("is not supported: choose quantization"),
    "pooler_config": never("is not supported: models generate text"),
    "logits_processors": never("is not supported: give them to SamplingParams"),
    "kv_transfer_config": never("is not supported: the KV cache stays in its engine"),
    "disable_sliding_window": only(False, why="is not supported: a window is part of the model"),
    # of images and sounds, which no prompt can have
    "limit_mm_per_prompt": OBJECT,
    "mm_processor_kwargs": OBJECT,
    "media_io_kwargs": OBJECT,
    "mm_processor_cache_gb": _NUMBER,
    "allowed_local_media_path": TEXT,
    "allowed_media_domains": label(list, "a list of names"),
    "enable_prompt_embeds": only(False, why="is not supported: give text or token ids"),
    "language_model_only": FLAG,
    "mm_encoder_only": only(False, why=_TEXT_ONLY),
}  # fmt: skip

_OURS = {"kv_cache_memory_bytes": "kv_cache_memory", "num_gpu_blocks_override": "num_blocks"}
_DTYPES = {"half": "float16", "float": "float32"}
LEAST_OF_A_GPU = 0.8
"""The pool takes most of a GPU; who leaves it less than this wants the rest for something else."""

CALL: Mapping[str, Neutral] = {
    "lora_request": never(_NO_ADAPTERS),
    "prompt_adapter_request": never(_NO_ADAPTERS),
    "tokenization_kwargs": never("is not supported: give token ids"),
    "mm_processor_kwargs": OBJECT,
    "guided_options_request": never("is not supported: give structured_outputs to SamplingParams"),
    "chat_template_content_format": only(
        "auto", "string", "openai", why="must be 'auto', 'string' or 'openai'"
    ),
}
"""Of its ``generate`` and ``chat``."""


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` in the names of ``EngineConfig``, without what changes no result and None where it is no value.

    Raises ValueError naming an option that cannot be had. Names that nobody knows are left in.
    """
    optional = {field.name for field in fields(EngineConfig) if field.default is None}
    options: dict[str, Any] = {}
    for name, value in without_neutral(given, NEUTRAL).items():
        name = _OURS.get(name, name)
        if name in ("dtype", "kv_cache_dtype") and value is not None:
            value = str(value).removeprefix("torch.")
            value = _DTYPES.get(value, value)
        if name == "max_model_len" and value in (-1, "auto"):
            value = None
        if value is not None or name in optional:
            options[name] = value
    share = given.get("gpu_memory_utilization")
    if share is not None and share < LEAST_OF_A_GPU and options.get("device", "cpu") != "cpu":
        raise ValueError(f"gpu_memory_utilization={share} {NEUTRAL['gpu_memory_utilization'].why}")
    return options
