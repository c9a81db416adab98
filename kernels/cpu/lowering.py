"""What the library multiplies of a quantised weight, and what is done to inputs and outputs instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paged_backend.kernels.affine import Affine
from paged_backend.kernels.array import Array, bfloat16, float32
from paged_backend.kernels.base import PackedLinear
from paged_backend.kernels.exact_blocks import exact_blocks
from paged_backend.kernels.float_codes import E4M3, Float8
from paged_backend.kernels.quantized import QuantizedWeight
from paged_backend.kernels.weights import Weight


@dataclass(frozen=True, slots=True)
class Lowered:
    """Value [n, order[k]] is weight[n, k] * scales[n].

    weight: blocks or an array where there is an exact form; else as it was. order: integers [K], or None for ascending.
    scales: float32 [N], or None for ones.
    """

    weight: Weight
    order: Array | None = None
    scales: Array | None = None

    def beside(self, other: Lowered) -> bool:
        """Whether both can be one linear as far as inputs and outputs go."""
        if (self.scales is None) != (other.scales is None) or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or np.array_equal(self.order, other.order)


def lower(weight: Weight) -> Lowered:
    """The smallest exact form that is multiplied fast."""
    plain, order = weight, None
    if isinstance(weight, Affine) and weight.groups is not None:
        order = _by_group(weight)
        if order is not None:
            plain = replace(weight, codes=weight.codes[:, order], groups=None)
    if not isinstance(plain, QuantizedWeight):
        return Lowered(weight)
    blocks = exact_blocks(plain)
    if blocks is not None:
        return Lowered(blocks, order)
    if isinstance(plain, Affine) and plain.scales.shape[1] == 1:
        scales = float32(plain.scales)
        blocks = exact_blocks(replace(plain, scales=np.ones_like(scales)))
        if blocks is not None:
            return Lowered(blocks, order, scales[:, 0])
    if isinstance(plain, Float8) and plain.scales.shape[1] == 1:
        rows = np.arange(len(plain)) // plain.block[0]
        return Lowered(_E4M3[plain.codes], None, float32(plain.scales)[rows, 0])
    return Lowered(weight)


def runs(
    weights: Sequence[Weight], kind: Callable[[Weight], int | None]
) -> Iterator[tuple[int | None, list[Lowered]]]:
    """Neighbours that can be one linear, lowered, with the ``kind`` that they share."""
    found: list[tuple[int | None, list[Lowered]]] = []
    for part in map(lower, weights):
        of_part = kind(part.weight)
        if found and found[-1][0] == of_part and found[-1][1][-1].beside(part):
            found[-1][1].append(part)
        else:
            found.append((of_part, [part]))
    yield from found


_E4M3 = bfloat16(E4M3)  # which holds each of them


def _by_group(weight: Affine) -> Array | None:
    """The inputs group by group; None if groups differ in size, so that they are no equal runs then."""
    assert weight.groups is not None
    count, k = weight.scales.shape[1], weight.shape[1]
    sizes = np.bincount(weight.groups, minlength=count)
    return np.argsort(weight.groups, kind="stable") if k and (sizes == k // count).all() else None


class AroundLinear(PackedLinear):
    """A linear of which inputs are taken in another order, and outputs multiplied; see :class:`Lowered`."""

    def __init__(
        self, inner: PackedLinear, order: Array | None, scales: Array | None, bias: Array | None
    ) -> None:
        self.inner, self.order, self.scales, self.bias = inner, order, scales, bias
        self.in_features, self.out_features = inner.in_features, inner.out_features

    def nbytes(self) -> int:
        held = (self.order, self.scales, self.bias)
        return self.inner.nbytes() + sum(part.nbytes for part in held if part is not None)

    def inputs(self, x: Array) -> Array:
        """x [T, K] as ``inner`` takes it."""
        return x if self.order is None else np.ascontiguousarray(x[:, self.order])

    def finish(self, out: Array) -> Array:
        """What ``inner`` gave, [T, N], changed in place."""
        if self.scales is not None:
            out *= self.scales
        if self.bias is not None:
            out += self.bias
        return out

    def finish_rows(self, rows: Array, ids: Array) -> Array:
        """Rows ``ids`` of ``inner`` [T, K] -> of the matrix."""
        if self.order is not None:
            placed = np.empty_like(rows)
            placed[:, self.order] = rows
            rows = placed
        if self.scales is not None:
            rows *= self.scales[ids.reshape(-1), None]
        return rows
