"""QuantizedWeight: a matrix held as codes of a few bits and the scales that make numbers of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from paged_backend.kernels.array import Array

if TYPE_CHECKING:
    from typing import Self  # which Python 3.10 has not


class QuantizedWeight(ABC):
    """A matrix [N, K] of a linear; its arrays may be views of a mapped file.

    source: where it comes from, for messages.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    source: str

    def __len__(self) -> int:
        return self.shape[0]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of codes, scales and whatever else it holds."""

    @abstractmethod
    def to_dense(self) -> Array:
        """float32 [N, K], the values that the format defines."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Self:
        """Outputs ``start`` to ``stop`` - 1; the same memory where the format allows it."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Self:
        """Inputs ``start`` to ``stop`` - 1. Raises ValueError where that cuts through what shares a scale."""
