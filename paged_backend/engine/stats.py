"""What the engine measures about itself: KV use at every step, and a snapshot for ``engine.stats()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.engine.core import EngineCore


@dataclass(frozen=True, slots=True)
class StepUsage:
    """KV memory after one step. A block that several sequences share counts once in ``blocks`` and ``live_tokens``.

    blocks: blocks referenced by sequences. live_tokens: slots of these that hold a token's KV. logical_tokens: tokens
    of all sequences, as if nothing were shared. running: sequences in the batch.
    """

    blocks: int
    live_tokens: int
    logical_tokens: int
    running: int


class UsageMeter:
    """Accumulates :class:`StepUsage`; averages are weighted by allocated blocks, so idle steps count nothing."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.steps = 0
        self.last = StepUsage(0, 0, 0, 0)
        self.peak_blocks = 0
        self._blocks = 0
        self._live = 0
        self._logical = 0
        self._running = 0

    def add(self, usage: StepUsage) -> None:
        self.last = usage
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, usage.blocks)
        self._blocks += usage.blocks
        self._live += usage.live_tokens
        self._logical += usage.logical_tokens
        self._running += usage.running

    @property
    def waste(self) -> float:
        """1 - live slots / allocated slots: the share of allocated KV memory that held nothing."""
        return 1 - self._live / (self._blocks * self.block_size) if self._blocks else 0.0

    @property
    def sharing(self) -> float:
        """Logical tokens per live slot; above 1 where prefixes or forks share blocks."""
        return self._logical / self._live if self._live else 1.0

    @property
    def mean_running(self) -> float:
        return self._running / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine. Counters run from its start; ``kv_waste`` averages over every step."""

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
            kv_usage=cache.pool.num_used / cache.pool.capacity,
            kv_waste=usage.waste,
            kv_sharing=usage.sharing,
            kv_peak_blocks=usage.peak_blocks,
            mean_running=usage.mean_running,
            prefix_cache_queries=cache.prefix_queries,
            prefix_cache_hits=cache.prefix_hits,
            health=health,
        )
