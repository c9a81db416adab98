"""Weights in GGML's blocks: cut by rows and columns as tensor parallelism will, compared, packed as other dtypes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.kernels.array import bfloat16
from paged_backend.kernels.ggml import GGML_TYPES
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.weights import GGMLBlocks, same_values, to_dense

TYPES = {type_.name: type_ for type_ in GGML_TYPES.values()}


def quantised(name: str, rows: int, blocks: int, seed: int = 0) -> GGMLBlocks:
    type_ = TYPES[name]
    values = np.random.default_rng(seed).normal(size=(rows, blocks * type_.block)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(type_.id))
    return GGMLBlocks(raw.reshape(-1), type_, values.shape)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_1"])
@given(data=st.data(), rows=st.integers(1, 9), blocks=st.integers(1, 5))
def test_rows_and_columns_are_those_of_the_dense_matrix(
    name: str, data: st.DataObject, rows: int, blocks: int
) -> None:
    weight = quantised(name, rows, blocks)
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, rows)] * 2)))
    left, right = sorted(data.draw(st.tuples(*[st.integers(0, blocks)] * 2)))
    part = weight.rows(low, high).columns(left * 32, right * 32)
    assert np.array_equal(part.to_dense(), weight.to_dense()[low:high, left * 32 : right * 32])


def test_a_cut_through_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="cut through a block of 32"):
        quantised("Q8_0", 2, 2).columns(0, 40)


def test_matrices_are_compared_by_value_whatever_their_formats() -> None:
    one, other = quantised("Q8_0", 70, 600), quantised("Q8_0", 70, 600, seed=1)
    assert same_values(one, quantised("Q8_0", 70, 600))
    assert same_values(one, one.to_dense())
    assert same_values(bfloat16(one.to_dense()), bfloat16(one.to_dense()))
    changed = one.to_dense()
    changed[-1, -1] += 1
    for different in (other, changed, one.rows(0, 69), quantised("Q4_0", 70, 600)):
        assert not same_values(one, different)


def test_blocks_are_packed_beside_dense_matrices() -> None:
    kernels, blocks = ReferenceKernels(), quantised("Q4_0", 5, 3)
    dense = np.random.default_rng(2).normal(size=(4, 96)).astype(np.float32)
    x = np.random.default_rng(3).normal(size=(2, 96)).astype(np.float32)
    for dtype in ("auto", "float32", "bfloat16"):
        together = kernels.linear(x, kernels.pack_linear([blocks, dense], dtype=dtype))
        expanded = kernels.linear(x, kernels.pack_linear([to_dense(blocks), dense], dtype=dtype))
        assert np.array_equal(together, expanded)
