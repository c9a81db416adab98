"""What is known of a model before its weights are read: enough for frameworks that cut texts to its context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.cache.manager import CacheManager
from paged_backend.config import EngineConfig
from paged_backend.engine.engine import Engine
from paged_backend.engine.factory import pool_blocks, sliding_window
from paged_backend.engine.limits import RequestLimits
from paged_backend.errors import UnsupportedModelError
from paged_backend.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """max_model_len: longest prompt + output in tokens. generation_config: defaults for sampling options."""

    max_model_len: int
    generation_config: Mapping[str, Any]

    @classmethod
    def of(cls, engine: Engine) -> ModelFacts:
        return cls(engine.max_model_len, engine.generation_config)

    @classmethod
    def expected(cls, config: EngineConfig) -> ModelFacts:
        """What :meth:`of` will say of an engine for ``config`` (on a GPU at most that). Raises ModelLoadError.

        Only the config is read, and of a model on the hub only that is fetched.
        """
        from paged_backend.checkpoints.loading import load_config
        from paged_backend.models.architectures import spec_from_config

        found, generation_config = load_config(config.model)
        try:
            spec = spec_from_config(found)
        except UnsupportedModelError:  # it may run through transformers, which reads the same
            context = found.get("max_position_embeddings") or found.get("max_seq_len") or 4096
            return cls(config.max_model_len or int(context), generation_config)
        context = config.max_model_len or spec.max_position
        if config.device != "cpu" and config.num_blocks is None and config.kv_cache_memory is None:
            return cls(context, generation_config)
        block_bytes = ModelRunner.block_bytes(spec, config.block_size, config.stored_kv_dtype)
        blocks = config.num_blocks or pool_blocks(config, spec, context, block_bytes)
        cache = CacheManager(blocks, config.block_size, sliding_window(spec))
        limits = RequestLimits(cache, spec.vocab_size, context, config.token_budget, config.max_num_seqs)
        return cls(limits.longest_request(), generation_config)
