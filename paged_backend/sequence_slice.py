"""SequenceSlice: what one sequence contributes to a step. Needs no torch, so that whatever plans steps needs none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """token_ids: the ids to compute, at positions ``start`` .. ``start + len(token_ids) - 1``.
    block_ids: int32 block table covering them. logit_rows: which of the new tokens need logits (indices into
    token_ids).
    """

    token_ids: Sequence[int]
    start: int
    block_ids: np.ndarray
    logit_rows: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed with these."""
        return self.start + len(self.token_ids)
