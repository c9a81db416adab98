"""Affine: integer codes with a scale, and maybe a zero point, for each group of inputs (GPTQ, AWQ, int8 ...)."""

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


@dataclass(frozen=True, slots=True)
class Affine(QuantizedWeight):
    """Value [n, k] is (codes[n, k] - zeros[n, g]) * scales[n, g], where g is the group of input k.

    codes: uint8 or int8 [N, K]. scales: any float dtype [N, G]. zeros: integers [N, G], or None for 0. bits: of a code.
    groups: integers [K], the group of each input; None for equal runs of K / G inputs.
    A product of a code and a 16-bit scale is exact in float32; tools that calculate in 16 bits round it.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    bits: int
    groups: Array | None = None
    source: str = ""

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        count = self.scales.shape[-1] if self.scales.ndim == 2 else 0
        fits = self.scales.shape == (n, count) and count > 0
        fits = fits and (self.zeros is None or self.zeros.shape == self.scales.shape)
        if self.groups is None:
            fits = fits and k % count == 0
        else:
            fits = fits and self.groups.shape == (k,)
            if fits and k and not 0 <= self.groups.min() <= self.groups.max() < count:
                raise ModelLoadError(
                    f"{self.source}: its inputs are in groups beyond the {count} that it has"
                )
        if not fits:
            raise ModelLoadError(
                f"{self.source}: scales {self.scales.shape} do not fit a matrix {self.codes.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.groups)
        return sum(part.nbytes for part in parts if part is not None)

    def to_dense(self) -> Array:
        n, k = self.codes.shape
        out = np.empty((n, k), np.float32)
        step = max(1, _SLICE // max(1, k))
        # scales of a damaged file may be inf or nan; they propagate without a warning
        with np.errstate(all="ignore"):
            for start in range(0, n, step):
                part = slice(start, start + step)
                scales = float32(self.scales[part])
                zeros = None if self.zeros is None else self.zeros[part].astype(np.float32)
                values = out[part]
                values[:] = self.codes[part]
                if self.groups is not None:
                    scales = scales[:, self.groups]
                    zeros = None if zeros is None else zeros[:, self.groups]
                else:
                    values = values.reshape(*scales.shape, -1)
                    scales = scales[..., None]
                    zeros = None if zeros is None else zeros[..., None]
                if zeros is not None:
                    values -= zeros
                values *= scales
        return out

    def rows(self, start: int, stop: int) -> Self:
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop], zeros=zeros)

    def columns(self, start: int, stop: int) -> Self:
        codes = self.codes[:, start:stop]
        if self.groups is not None:
            return replace(self, codes=codes, groups=self.groups[start:stop])
        size = self.codes.shape[1] // self.scales.shape[1]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        if start % size or stop % size:
            raise ValueError(f"columns {start} to {stop} cut through a group of {size}")
        kept = slice(start // size, stop // size)
        zeros = None if self.zeros is None else self.zeros[:, kept]
        return replace(self, codes=codes, scales=self.scales[:, kept], zeros=zeros)
