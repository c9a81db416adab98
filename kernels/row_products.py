"""Matrix products of which no row depends on the others, from a library whose own do.

A BLAS chooses its kernels, its threads and the order of its sums by the shape of the product, so a row's bits change
with the number of rows beside it. Here products are put together from small ones that all have one shape: LANES rows,
which are the columns of the right-hand side, so that each is a lane of the same vector instructions; OUTPUTS outputs;
INPUTS inputs, added in ascending order. They are too small for a library to use threads. numpy's, because torch's reads
process-wide settings that change its results.
"""

from __future__ import annotations

import numpy as np

from paged_backend.kernels.array import Array

LANES = 16
"""Rows of one product: a whole vector of the widest instruction set, and two or four of the others."""

OUTPUTS, INPUTS = 32, 512
"""The other sides of the largest product."""


def to_lanes(rows: Array) -> Array:
    """[..., T, K] -> [..., ceil(T / LANES), K, LANES]: every LANES rows as columns, zeros where there are none."""
    *outer, count, k = rows.shape
    tiles = -(-count // LANES)
    padded = np.zeros((*outer, tiles * LANES, k), np.float32)
    padded[..., :count, :] = rows
    return np.ascontiguousarray(padded.reshape(*outer, tiles, LANES, k).swapaxes(-1, -2))


def from_lanes(lanes: Array, count: int) -> Array:
    """[..., tiles, N, LANES] -> [..., count, N], the inverse of :func:`to_lanes`."""
    *outer, tiles, n, _ = lanes.shape
    return np.ascontiguousarray(lanes.swapaxes(-1, -2).reshape(*outer, tiles * LANES, n)[..., :count, :])


def row_linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """float32 x [T, K] @ weight [N, K] transposed + bias [N] -> [T, N]."""
    n, k = weight.shape
    whole = n // OUTPUTS * OUTPUTS
    rest = np.zeros((OUTPUTS, k), np.float32)
    rest[: n - whole] = weight[whole:]
    groups = [weight[:whole].reshape(-1, OUTPUTS, k), rest[None]]
    out = np.empty((len(x), n), np.float32)
    with np.errstate(all="ignore"):
        for first, lanes in zip(range(0, len(x), LANES), to_lanes(x)):
            sums = np.zeros((whole + OUTPUTS, LANES), np.float32)
            for at in range(0, k, INPUTS):
                inputs = slice(at, at + INPUTS)
                for group, part in zip(groups, (sums[:whole], sums[whole:])):
                    part += (group[:, :, inputs] @ lanes[inputs]).reshape(-1, LANES)
            rows = out[first : first + LANES]
            np.copyto(rows, sums[:n].T[: len(rows)])
            if bias is not None:
                rows += bias
    return out
