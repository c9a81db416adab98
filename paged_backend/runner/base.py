"""Runner: what the engine needs of whatever computes its steps, and the terms in which it asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_backend.sequence_slice import SequenceSlice

if TYPE_CHECKING:
    from paged_backend.runner.sampler import Sampled, SampleRow


@dataclass(frozen=True, slots=True)
class ScheduledSequence(SequenceSlice):
    """What a step computes of one sequence, and what it draws and scores from that.

    rows: the samples to draw from the logits of its last token (several for n > 1, none while the prompt is
    incomplete). scored_ids: for prompt logprobs, the token that follows each of the first ``len(scored_ids)`` of
    ``logit_rows``. num_top: how many alternatives to report for those.
    """

    rows: Sequence[SampleRow] = ()
    scored_ids: Sequence[int] = ()
    num_top: int = 0


@dataclass(slots=True)
class Result:
    """sampled: one per row of the sequence, an exception where that row alone could not be sampled."""

    sampled: list[Sampled | Exception]
    prompt_logprobs: list[Sampled]


class Runner(ABC):
    """Runs steps, in the order in which they are launched. Writing KV is idempotent: a step may be run again, in parts.

    Whatever a step raises is its own affair, but for DeviceLostError, after which none can be run.

    runs_ahead: ``launch`` returns before the step is done, and may be called for the next one before the results are
    asked for. Token ids of that next one may then be stand-ins (:func:`drawn_by`).
    """

    vocab_size: int
    runs_ahead = False

    @abstractmethod
    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[Result]:
        """Compute one step."""

    def launch(self, scheduled: Sequence[ScheduledSequence]) -> Callable[[], list[Result]]:
        """Begin a step; what is returned waits for it and gives its results, or raises what went wrong."""
        results = self.run(scheduled)
        return lambda: results

    def draws_alone(self, row: SampleRow) -> bool:
        """Of a runner that runs ahead: whether it can draw this row before the host knows the tokens before it."""
        return False

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer, before the step that writes to the destinations."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of the model and the KV memory; nothing can be run afterwards."""

    @abstractmethod
    def give_back(self, blocks: Sequence[int]) -> bool:
        """Return the memory of ``blocks`` (ascending, holding nothing) to the system; False if it keeps all of it."""


def drawn_by(row: int) -> int:
    """A token id that nobody knows yet: what row ``row`` of the step launched before this one draws."""
    return -1 - row
