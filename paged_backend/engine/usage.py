"""What KV memory is used for, step by step."""

from __future__ import annotations

from dataclasses import dataclass


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
