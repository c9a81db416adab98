"""EngineStats: one moment of an engine, for ``engine.stats()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine. Counters run from its start; ``kv_waste`` averages over every step.

    kv_committed_bytes: memory of the blocks that were written since the start or since it was given back; what it
    exceeds the used blocks by holds cached prefixes or nothing.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    scheduled_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_block_bytes: int
    kv_committed_bytes: int
    kv_usage: float
    kv_waste: float
    kv_sharing: float
    kv_peak_blocks: int
    mean_running: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    health: str

    @classmethod
    def of(
        cls, core: EngineCore, prompt_tokens: int, generation_tokens: int, block_bytes: int, health: str
    ) -> EngineStats:
        """Of a core, with what only its engine knows."""
        scheduler, cache, usage = core.scheduler, core.cache, core.usage
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=core.num_steps,
            num_failed_steps=core.num_failed_steps,
            num_preemptions=scheduler.stats.num_preemptions,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
            scheduled_tokens=scheduler.stats.scheduled_tokens,
            kv_blocks_total=cache.pool.capacity,
            kv_blocks_used=cache.pool.num_used,
            kv_blocks_cached=cache.prefixes.num_cached_blocks,
            kv_block_bytes=block_bytes,
            kv_committed_bytes=cache.pool.num_committed * block_bytes,
            kv_usage=cache.pool.num_used / cache.pool.capacity,
            kv_waste=usage.waste,
            kv_sharing=usage.sharing,
            kv_peak_blocks=usage.peak_blocks,
            mean_running=usage.mean_running,
            prefix_cache_queries=cache.prefix_queries,
            prefix_cache_hits=cache.prefix_hits,
            health=health,
        )
