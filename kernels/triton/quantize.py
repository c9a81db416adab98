"""Weight-only int8 and int4 in the layout of ``int_matmul``: packing, and what the packed numbers stand for.

int8: symmetric, one float32 scale per output (absolute maximum / 127): 8 bits per weight and 32 / K.
int4: groups of 32 inputs, each with a float16 scale and minimum (weight = minimum + scale * number): 5 bits per
weight. Two 4-bit numbers share a byte: byte j of a group holds input j in its low and input j + 16 in its high
half, so that a tile of bytes multiplies two tiles of inputs without being shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class IntWeights:
    """bits 8: numbers int8 [N, K], scale float32 [N], minimum None.

    bits 4: numbers uint8 [N, P / 2] and scale, minimum float16 [N, P / 32] with P = K rounded up to whole groups.
    """

    bits: int
    in_features: int
    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None

    def nbytes(self) -> int:
        """Bytes held."""
        return (
            self.numbers.nbytes + self.scale.nbytes + (self.minimum.nbytes if self.minimum is not None else 0)
        )


def join(parts: Sequence[IntWeights]) -> IntWeights:
    """Several matrices of the same K and bits as one, outputs one after another."""
    first = parts[0]
    minima = [p.minimum for p in parts if p.minimum is not None]
    return IntWeights(
        first.bits,
        first.in_features,
        torch.cat([p.numbers for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat(minima) if minima else None,
    )


def quantize_int8(weight: Tensor) -> IntWeights:
    """weight [N, K], any float dtype. Error of a weight: half a step of its row."""
    values = weight.to(torch.float32)
    scale = values.abs().amax(1) / 127
    scale[scale == 0] = 1
    numbers = torch.round(values / scale[:, None]).clamp_(-127, 127).to(torch.int8)
    return IntWeights(8, weight.shape[1], numbers, scale, None)


def quantize_int4(weight: Tensor) -> IntWeights:
    """weight [N, K], any float dtype. Error of a weight: half a step of its group and the rounding of its minimum."""
    n, k = weight.shape
    padded = -(-k // GROUP) * GROUP
    values = torch.zeros(n, padded, dtype=torch.float32, device=weight.device)
    values[:, :k] = weight
    if padded > k:  # the last group's own values, so that padding does not widen its range
        values[:, k:] = values[:, k - 1 : k]
    grouped = values.view(n, padded // GROUP, GROUP)
    minimum = grouped.amin(2).to(torch.float16)
    scale = ((grouped.amax(2) - minimum.to(torch.float32)) / 15).clamp_(min=0).to(torch.float16)
    # numbers are found with the rounded scale and minimum, which are what will be multiplied
    step = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32)[:, :, None]
    numbers = (
        torch.round((grouped - minimum.to(torch.float32)[:, :, None]) / step).clamp_(0, 15).to(torch.uint8)
    )
    low, high = numbers.split(GROUP // 2, dim=2)
    return IntWeights(4, k, (low | high << 4).reshape(n, padded // 2), scale, minimum)


def dequantize(weights: IntWeights, rows: Tensor | None = None) -> Tensor:
    """float32 [rows, K]: what the numbers stand for; ``rows`` (int64) picks outputs."""
    numbers = weights.numbers if rows is None else weights.numbers[rows]
    scale = weights.scale if rows is None else weights.scale[rows]
    if weights.minimum is None:
        return numbers.to(torch.float32) * scale[:, None]
    minimum = weights.minimum if rows is None else weights.minimum[rows]
    pairs = numbers.view(*scale.shape, GROUP // 2)
    grouped = torch.cat([pairs & 15, pairs >> 4], dim=2).to(torch.float32)
    grouped = grouped * scale.to(torch.float32)[:, :, None] + minimum.to(torch.float32)[:, :, None]
    return grouped.flatten(1)[:, : weights.in_features]
