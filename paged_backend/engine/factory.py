"""From an EngineConfig to a running Engine: kernels, weights, tokenizer, pool."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from paged_backend.cache.manager import CacheManager
from paged_backend.config import EngineConfig
from paged_backend.engine.chunking import chunk_cost
from paged_backend.engine.core import EngineCore
from paged_backend.engine.engine import Engine
from paged_backend.engine.scheduler import Scheduler
from paged_backend.kernels.array import ITEMSIZE
from paged_backend.machine import usable_memory
from paged_backend.models.spec import DecoderSpec
from paged_backend.runner.base import Runner
from paged_backend.runner.model_runner import ModelRunner
from paged_backend.tokenization import ChatTokenizer

if TYPE_CHECKING:
    from paged_backend.checkpoints.checkpoint import Checkpoint
    from paged_backend.kernels.base import Kernels
    from paged_backend.models.loading import LoadedModel

logger = logging.getLogger("paged_backend")


def build_engine(config: EngineConfig) -> Engine:
    """Load ``config.model`` and start an engine, which nobody shares but by ``Engine.of``."""
    from paged_backend.checkpoints.loading import load_checkpoint
    from paged_backend.checkpoints.resolve import resolve_model
    from paged_backend.models.loading import build_model

    kernels = kernels_for(config)
    checkpoint = load_checkpoint(resolve_model(config.model))
    with ThreadPoolExecutor(1, "paged_backend-tokenizer") as beside:  # weights are packed in C meanwhile
        tokenizer = beside.submit(_tokenizer, config, checkpoint)

        def tokenizer_is_good() -> None:  # so far: a model of many gigabytes is not packed before it is told
            if tokenizer.done():
                tokenizer.result()

        model = build_model(config, kernels, checkpoint, on_packed=tokenizer_is_good)
        return start_engine(config, kernels, model, tokenizer.result())


def kernels_for(config: EngineConfig) -> Kernels:
    """The kernels that ``config`` asks for. Raises RuntimeError naming the fix where its device is missing."""
    from paged_backend.kernels.select import select_kernels

    return select_kernels(
        config.kernels, config.threads, config.device, config.activation_dtype, config.matmul_precision
    )


def start_engine(
    config: EngineConfig, kernels: Kernels, model: LoadedModel, tokenizer: ChatTokenizer | None
) -> Engine:
    """An engine over a model that is loaded already. tokenizer: may be None; prompts must be token ids then."""
    block_bytes = ModelRunner.block_bytes(model.spec, config.block_size, config.stored_kv_dtype)
    num_blocks = config.num_blocks or pool_blocks(config, model.spec, model.max_model_len, block_bytes)
    runner = make_runner(config, kernels, model, num_blocks)
    cache = CacheManager(
        num_blocks, config.block_size, sliding_window(model.spec), config.enable_prefix_caching
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        chunk_cost=chunk_cost(model.spec),
    )
    return Engine(
        EngineCore(runner, cache, scheduler, model.max_model_len),
        tokenizer,
        config,
        eos_token_ids=model.eos_token_ids,
        generation_config=model.checkpoint.generation_config,
        block_bytes=block_bytes,
        effective={
            "max_model_len": model.max_model_len,
            "num_blocks": num_blocks,
            "tokenizer": os.path.realpath(model.tokenizer_source),
        },
    )


def make_runner(config: EngineConfig, kernels: Kernels, model: LoadedModel, num_blocks: int) -> Runner:
    """The runner for the device of ``config``."""
    kv_dtype = config.stored_kv_dtype
    if not config.through_triton:
        return ModelRunner(model.decoder, kernels, num_blocks, config.block_size, kv_dtype)
    from paged_backend.kernels.triton.backend import TritonKernels
    from paged_backend.models.decoder import Decoder
    from paged_backend.runner.device_runner import DeviceRunner

    if not isinstance(kernels, TritonKernels):
        raise TypeError(f"device={config.device!r} needs Triton kernels, not {type(kernels).__name__}")
    runner = DeviceRunner(
        model.decoder,
        kernels,
        num_blocks,
        config.block_size,
        kv_dtype,
        config.max_num_seqs,
        model.max_model_len,
        graphs=isinstance(model.decoder, Decoder),  # modules of transformers may look at values on the way
        whole_contexts=sliding_window(model.spec) is None,
    )
    if config.device != "cpu":
        runner.warm_up(max(1, min(64, model.max_model_len - 1)))
    return runner


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> ChatTokenizer | None:
    """The model's tokenizer; None, said once, for a folder that brings none (token ids still work)."""
    from paged_backend.text.tokenizer import load_tokenizer

    source = config.tokenizer or checkpoint.tokenizer_source
    folder = Path(source)
    files = ("tokenizer*", "vocab*", "spiece.model", "*.gguf")
    if config.tokenizer is None and folder.is_dir() and not any(any(folder.glob(name)) for name in files):
        logger.warning("%s has no tokenizer files: prompts must be token ids", folder)
        return None
    return load_tokenizer(source, checkpoint)


def sliding_window(spec: DecoderSpec) -> int | None:
    """The window after which KV can be freed: only if every layer slides, and then the widest."""
    return max(w for w in spec.windows if w) if all(spec.windows) else None


def pool_blocks(config: EngineConfig, spec: DecoderSpec, max_model_len: int, block_bytes: int) -> int:
    """Blocks that fit ``kv_cache_memory`` (default: a quarter of what the process may use, or what is free on a
    device), the null block included.

    No more than every seat could fill; memory is committed when a block is first used, so a generous limit costs
    nothing.
    """
    memory = config.kv_cache_memory
    if memory is None and config.device != "cpu":
        from paged_backend.runner.device_memory import free_device_memory, step_memory

        step = step_memory(spec, config.token_budget, config.max_num_seqs, ITEMSIZE[config.activation_dtype])
        memory = free_device_memory(config.device, step)
    if memory is None:
        memory = usable_memory() // 4
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min(memory // block_bytes, most)
    if blocks < 1:
        raise ValueError(
            f"kv_cache_memory={memory} holds not even one KV block of {block_bytes} bytes: raise it"
        )
    return int(blocks) + 1
