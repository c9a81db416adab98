"""Float8 and Float4: codes that stand for numbers of a table, with scales for blocks of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paged_backend.errors import ModelLoadError
from paged_backend.kernels.array import Array, float32
from paged_backend.kernels.quantized import QuantizedWeight

if TYPE_CHECKING:
    from typing import Self  # which Python 3.10 has not

_SLICE = 1 << 16  # values expanded at a time, so that they stay in cache


def _e4m3() -> Array:
    """The numbers of the format's 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, np.full(256, -6))
    )
    size[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


E4M3 = _e4m3()
"""float32 [256]: what the codes of float8 e4m3fn stand for."""

E8M0 = np.append(np.ldexp(np.ones(255), np.arange(255) - 127), np.nan).astype(np.float32)
"""float32 [256]: what the codes of a scale of exponents alone stand for, 2 ** (code - 127)."""

_SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(_SIZES + [-size for size in _SIZES], np.float32)
"""float32 [16]: what the codes of float4 e2m1 stand for."""


@dataclass(frozen=True, slots=True)
class Float8(QuantizedWeight):
    """Value [n, k] is E4M3[codes[n, k]] * scales[n // block[0], k // block[1]].

    codes: uint8 [N, K]. scales: any float dtype [ceil(N / block[0]), ceil(K / block[1])]; one for all has a block as
    large as the matrix, one for each output a block of one row.
    """

    codes: Array
    scales: Array
    block: tuple[int, int]
    source: str = ""

    def __post_init__(self) -> None:
        needed = tuple(-(-size // part) for size, part in zip(self.codes.shape, self.block))
        if self.scales.shape != needed:
            raise ModelLoadError(
                f"{self.source}: scales {self.scales.shape} do not fit a matrix {self.codes.shape} in blocks of "
                f"{self.block[0]} x {self.block[1]}"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to_dense(self) -> Array:
        n, k = self.codes.shape
        out = np.empty((n, k), np.float32)
        step = max(1, _SLICE // max(1, k))
        with np.errstate(all="ignore"):
            for start in range(0, n, step):
                part = slice(start, min(start + step, n))
                rows = float32(self.scales[np.arange(part.start, part.stop) // self.block[0]])
                np.multiply(E4M3[self.codes[part]], rows.repeat(self.block[1], axis=1)[:, :k], out=out[part])
        return out

    def rows(self, start: int, stop: int) -> Self:
        if start % self.block[0] == 0:
            scales, block = self.scales[start // self.block[0] : -(-stop // self.block[0])], self.block
        else:  # it begins within a block
            scales, block = self.scales[np.arange(start, stop) // self.block[0]], (1, self.block[1])
        return replace(self, codes=self.codes[start:stop], scales=scales, block=block)

    def columns(self, start: int, stop: int) -> Self:
        size, end = self.block[1], self.codes.shape[1]
        if start % size or (stop % size and stop != end):
            raise ValueError(f"columns {start} to {stop} cut through a block of {size}")
        kept = slice(start // size, -(-stop // size))
        return replace(self, codes=self.codes[:, start:stop], scales=self.scales[:, kept])


@dataclass(frozen=True, slots=True)
class Float4(QuantizedWeight):
    """Value [n, k] is table[code of n, k] * scales[n, k // group].

    codes: uint8 [N, K / 2], an even input in the low half. scales: float32 [N, K / group]. table: float32 [16].
    """

    codes: Array
    scales: Array
    table: Array
    source: str = ""

    def __post_init__(self) -> None:
        n, k = self.shape
        if self.scales.ndim != 2 or self.scales.shape[0] != n or k % max(1, self.scales.shape[1]):
            raise ModelLoadError(
                f"{self.source}: scales {self.scales.shape} do not fit a matrix {self.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to_dense(self) -> Array:
        n, k = self.shape
        out = np.empty((n, k), np.float32)
        step = max(1, _SLICE // max(1, k))
        with np.errstate(all="ignore"):
            for start in range(0, n, step):
                part = slice(start, start + step)
                values = out[part]
                values[:, ::2] = self.table[self.codes[part] & 15]
                values[:, 1::2] = self.table[self.codes[part] >> 4]
                values.reshape(len(values), -1, self.group)[:] *= self.scales[part][..., None]
        return out

    def rows(self, start: int, stop: int) -> Self:
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])

    def columns(self, start: int, stop: int) -> Self:
        if start % self.group or stop % self.group or start % 2 or stop % 2:
            raise ValueError(f"columns {start} to {stop} cut through a group of {self.group}")
        kept = slice(start // self.group, stop // self.group)
        return replace(self, codes=self.codes[:, start // 2 : stop // 2], scales=self.scales[:, kept])
