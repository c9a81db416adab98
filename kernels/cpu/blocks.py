"""Weights in GGML's block formats (the matrices of GGUF files), multiplied as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import numpy as np

from paged_backend.kernels.array import Array
from paged_backend.kernels.cpu.arena import Arena


class BlockLinear:
    """A matrix [N, K] in one block format, in the library's order: the file's codes and scales, about its size."""

    def __init__(
        self,
        library: CDLL,
        packed: Array,
        bias: Array | None,
        shape: tuple[int, int],
        format_id: int,
        threads: int,
    ) -> None:
        self._library, self._packed, self._bias = library, packed, bias
        self.out_features, self.in_features = shape
        self.format_id, self.threads = format_id, threads

    @classmethod
    def pack(
        cls,
        library: CDLL,
        parts: Sequence[Array],
        format_id: int,
        in_features: int,
        bias: Array | None = None,
        threads: int = 1,
        arena: Arena | None = None,
    ) -> BlockLinear:
        """Matrices one below the other, as one.

        parts: uint8, whole rows of blocks as a file has them. format_id: GGML's number of the format. bias: float32
        [N]. Raises ValueError for a format that has no kernel, and for bytes that are not whole rows.
        """
        row = library.pb_block_row_bytes(in_features, format_id)
        if row == 0:
            raise ValueError(f"no kernel multiplies GGML format {format_id}")
        for part in parts:
            if row < 0 or part.dtype != np.uint8 or part.nbytes % row or not part.flags.c_contiguous:
                raise ValueError(
                    f"{part.nbytes} bytes ({part.dtype}) are not whole rows of {in_features} weights in GGML format "
                    f"{format_id}"
                )
        n = sum(part.nbytes // row for part in parts)
        if bias is not None and (bias.shape != (n,) or bias.dtype != np.float32):
            raise ValueError(f"bias must be float32 [{n}], got {bias.dtype} {list(bias.shape)}")
        packed = (arena or Arena()).zeros(library.pb_linear_blocks_bytes(n, in_features, format_id))
        first = 0
        for part in parts:
            rows = part.nbytes // row
            library.pb_pack_blocks(
                packed.ctypes.data, part.ctypes.data, format_id, first, rows, in_features, threads
            )
            first += rows
        bias = None if bias is None else np.ascontiguousarray(bias)
        return cls(library, packed, bias, (n, in_features), format_id, threads)

    def nbytes(self) -> int:
        return self._packed.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def linear(self, x: Array) -> Array:
        """float32 [T, K] -> [T, N]. Raises ValueError for anything else."""
        if x.ndim != 2 or x.shape[1] != self.in_features or x.dtype != np.float32:
            raise ValueError(f"x must be float32 [T, {self.in_features}], got {x.dtype} {list(x.shape)}")
        x = np.ascontiguousarray(x)
        out = np.empty((len(x), self.out_features), np.float32)
        self._library.pb_linear_blocks(
            x.ctypes.data, self._packed.ctypes.data, None if self._bias is None else self._bias.ctypes.data,
            out.ctypes.data, len(x), self.out_features, self.in_features, self.format_id, self.threads,
        )  # fmt: skip
        return out

    def rows(self, ids: Array) -> Array:
        """int64 [T] -> float32 [T, K], the matrix's rows with the values that the format defines. Raises IndexError."""
        ids = np.ascontiguousarray(ids, np.int64)
        out = np.empty((ids.size, self.in_features), np.float32)
        bad = self._library.pb_embedding_blocks(
            ids.ctypes.data, self._packed.ctypes.data, out.ctypes.data,
            ids.size, self.out_features, self.in_features, self.format_id,
        )  # fmt: skip
        if bad >= 0:
            raise IndexError(f"row {int(ids.flat[bad])} is outside of a matrix of {self.out_features}")
        return out
