"""Weights as a file has them: an array of floating point numbers, or codes and scales of a quantised format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paged_backend.errors import ModelLoadError
from paged_backend.kernels.array import Array, equal, is_float
from paged_backend.kernels.ggml import GGMLType, dequantize
from paged_backend.kernels.quantized import QuantizedWeight

_SLICE = 1 << 20  # values compared at a time


@dataclass(frozen=True, slots=True)
class GGMLBlocks(QuantizedWeight):
    """A matrix [N, K] in one of GGML's formats.

    raw: uint8 [N * K / type.block * type.nbytes], row by row, maybe a view of a mapped file. source: where it comes
    from, for messages.
    """

    raw: Array
    type: GGMLType
    shape: tuple[int, ...]
    source: str = ""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if columns % self.type.block or self.raw.nbytes != rows * self.row_bytes:
            raise ModelLoadError(
                f"{self.source}: {self.raw.nbytes} bytes of {self.type.name} are no matrix {self.shape}"
            )

    @property
    def row_bytes(self) -> int:
        return self.shape[1] // self.type.block * self.type.nbytes

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def to_dense(self) -> Array:
        """float32 [N, K]. Raises ModelLoadError for a format that cannot be expanded here."""
        try:
            return dequantize(self.raw, self.type).reshape(self.shape)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.source}: {error}") from error

    def rows(self, start: int, stop: int) -> GGMLBlocks:
        """Outputs ``start`` to ``stop`` - 1; the same memory."""
        part = self.raw[start * self.row_bytes : stop * self.row_bytes]
        return replace(self, raw=part, shape=(stop - start, self.shape[1]))

    def columns(self, start: int, stop: int) -> GGMLBlocks:
        """Inputs ``start`` to ``stop`` - 1, whole blocks; a copy."""
        blocks = self.raw.reshape(self.shape[0], self.row_bytes // self.type.nbytes, self.type.nbytes)
        part = blocks[:, start // self.type.block : stop // self.type.block]
        if start % self.type.block or stop % self.type.block:
            raise ValueError(f"columns {start} to {stop} cut through a block of {self.type.block}")
        return replace(self, raw=np.ascontiguousarray(part).reshape(-1), shape=(self.shape[0], stop - start))


Weight = Array | QuantizedWeight
"""Of a linear: [N, K], any float dtype or a quantised format; may be memory-mapped."""


def is_weight(value: object) -> bool:
    """Whether it is of a kind that holds floating point weights."""
    return isinstance(value, QuantizedWeight) or (isinstance(value, np.ndarray) and is_float(value))


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """Outputs ``start`` to ``stop`` - 1; the same memory."""
    return weight.rows(start, stop) if isinstance(weight, QuantizedWeight) else weight[start:stop]


def to_dense(weight: Weight) -> Array:
    """The values as an array of floats."""
    return weight.to_dense() if isinstance(weight, QuantizedWeight) else weight


def same_values(a: Weight, b: Weight) -> bool:
    """Whether shapes and values are equal, whatever the formats. Ends at a difference."""
    if a.shape != b.shape:
        return False
    if isinstance(a, GGMLBlocks) and isinstance(b, GGMLBlocks) and a.type == b.type:
        return np.array_equal(a.raw, b.raw)
    step = max(1, _SLICE // max(1, a.shape[-1]))
    starts = range(0, len(a), step)
    return all(equal(*(to_dense(rows(w, at, min(at + step, len(a)))) for w in (a, b))) for at in starts)
