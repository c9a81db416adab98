"""Weights in GGML's block formats (the matrices of GGUF files), with the codes and scales of the file."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

from paged_backend.kernels.array import Array, address
from paged_backend.kernels.base import PackedLinear
from paged_backend.kernels.cpu.arena import Arena
from paged_backend.kernels.weights import GGMLBlocks, Weight


class BlockLinear(PackedLinear):
    """Panels of blocks in one format, about as large as in the file, and the bias float32 (or None)."""

    __slots__ = ("bias", "bias_pointer", "format_id", "in_features", "out_features", "pointer", "weights")

    def __init__(self, weights: Array, bias: Array | None, shape: tuple[int, int], format_id: int) -> None:
        self.weights, self.bias, self.format_id = weights, bias, format_id
        self.out_features, self.in_features = shape
        self.pointer = address(weights)
        self.bias_pointer = address(bias) if bias is not None else None

    def nbytes(self) -> int:
        return self.weights.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class JoinedLinear(PackedLinear):
    """Linears of one input beside each other: of matrices that a file has in several formats."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def nbytes(self) -> int:
        return sum(part.nbytes() for part in self.parts)


def format_of(library: CDLL, weight: Weight) -> int | None:
    """GGML's number of a format that the library multiplies; None for all else."""
    if not isinstance(weight, GGMLBlocks) or library.pb_block_row_bytes(weight.shape[1], weight.type.id) <= 0:
        return None
    return weight.type.id


def pack_blocks(
    library: CDLL, weights: Sequence[GGMLBlocks], bias: Array | None, arena: Arena, threads: int
) -> BlockLinear:
    """Matrices of one format (:func:`format_of`) one below the other, as one. bias: float32 [N]."""
    format_id, k = weights[0].type.id, weights[0].shape[1]
    n = sum(map(len, weights))
    packed = arena.zeros(library.pb_linear_blocks_bytes(n, k, format_id))
    first = 0
    for weight in weights:
        raw = weight.raw  # contiguous: it is a row, or was made by ``columns``
        library.pb_pack_blocks(address(packed), address(raw), format_id, first, len(weight), k, threads)
        first += len(weight)
    return BlockLinear(packed, bias, (n, k), format_id)
