"""What is repacked for the kernels has the same values, is no larger than it needs to be, and is multiplied as such."""

from __future__ import annotations

import numpy as np
import pytest

from paged_backend.kernels.affine import Affine
from paged_backend.kernels.array import BFLOAT16, bfloat16, float32
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.lowering import lower
from paged_backend.kernels.exact_blocks import exact_blocks
from paged_backend.kernels.float_codes import E2M1, E4M3, Float4, Float8
from paged_backend.kernels.weights import GGMLBlocks, to_dense


def affine(bits=4, symmetric=True, n=40, k=256, group=64, scale=np.float16, order=False, seed=0):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (n, k)).astype(np.uint8)
    zeros = np.full((n, k // group), 2 ** (bits - 1), np.uint8)
    if not symmetric:
        zeros = random.integers(0, 2**bits, zeros.shape).astype(np.uint8)
    steps = random.uniform(0.001, 0.1, zeros.shape).astype(np.float32)
    steps = bfloat16(steps) if scale is BFLOAT16 else steps.astype(scale)
    groups = random.permutation(np.arange(k) // group).astype(np.int32) if order else None
    return Affine(codes, steps, zeros, bits, groups)


def int8(n=40, k=256, scale=np.float32, seed=0):
    random = np.random.default_rng(seed)
    codes = random.integers(-128, 128, (n, k)).astype(np.int8)
    return Affine(codes, random.uniform(1e-4, 1e-3, (n, 1)).astype(scale), None, 8)


def float8(block, n=40, k=256, seed=0):
    random = np.random.default_rng(seed)
    codes = (random.integers(0, 0x60, (n, k)) | random.integers(0, 2, (n, k)) << 7).astype(np.uint8)
    shape = -(-n // block[0]), -(-k // block[1])
    return Float8(codes, random.uniform(0.001, 0.1, shape).astype(np.float32), block)


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (affine(2), "Q4_0"),
        (affine(3, symmetric=False), "Q4_0"),
        (affine(4), "Q4_0"),
        (affine(4, scale=BFLOAT16, group=32), "Q4_0"),
        (affine(4, group=256), "Q4_0"),
        (affine(4, symmetric=False), "Q5_0"),
        (affine(5), "Q5_0"),
        (affine(6, symmetric=False), "Q8_0"),
        (affine(8), "Q8_0"),
        (int8(scale=np.float16), "Q8_0"),
        (Affine(np.arange(-8, 8, dtype=np.int8).repeat(2)[None], np.ones((1, 1), np.float16), None, 4), "Q4_0"),
    ],
)  # fmt: skip
def test_integers_become_the_smallest_blocks_of_the_same_values(weight, name):
    blocks = exact_blocks(weight)
    assert blocks is not None
    assert blocks.type.name == name
    np.testing.assert_array_equal(blocks.to_dense(), weight.to_dense())
    np.testing.assert_array_equal(blocks.to_dense().view(np.uint32), weight.to_dense().view(np.uint32))


@pytest.mark.parametrize("group", [32, 64])
def test_float4_with_powers_of_two_becomes_mxfp4(group):
    pytest.importorskip("gguf")  # which expands it
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (30, 64)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), random.integers(-125, 127, (30, 128 // group))).astype(np.float32)
    weight = Float4(codes, scales, E2M1)
    blocks = exact_blocks(weight)
    assert blocks is not None
    assert blocks.type.name == "MXFP4"
    np.testing.assert_array_equal(blocks.to_dense(), weight.to_dense())


def test_a_float_of_another_table_or_scale_has_no_blocks():
    codes = np.zeros((2, 32), np.uint8)
    for scales, table in (
        (np.full((2, 2), 0.75, np.float32), E2M1),
        (np.full((2, 2), 2.0**-127, np.float32), E2M1),
        (np.full((2, 2), np.inf, np.float32), E2M1),
        (np.full((2, 4), 0.5, np.float32), E2M1),
        (np.full((2, 2), 0.5, np.float32), np.linspace(-1, 1, 16, dtype=np.float32)),
    ):
        assert exact_blocks(Float4(codes, scales, table)) is None


@pytest.mark.parametrize(
    "weight",
    [
        affine(scale=np.float32),  # more digits than a float16 has
        affine(group=16),
        affine(k=240, group=48),
        affine(8, symmetric=False),  # codes less zero points have nine bits
        affine(order=True),
        Affine(np.zeros((1, 32), np.uint8), np.full((1, 1), np.inf, np.float16), None, 4),
        float8((1, 256)),
    ],
)
def test_what_no_blocks_hold_exactly_is_left(weight):
    assert exact_blocks(weight) is None


LOWERED = {
    "act order": (affine(symmetric=False, order=True), GGMLBlocks),
    "int8 with float32 scales": (int8(), GGMLBlocks),
    "a float32 scale for each output": (affine(group=256, scale=np.float32), GGMLBlocks),
    "float8 per output": (float8((1, 256)), np.ndarray),
    "float8 per tensor": (float8((40, 256)), np.ndarray),
    "float8 per block of rows": (float8((16, 256)), np.ndarray),
    "float8 per block": (float8((16, 32)), Float8),
    "float32 scales": (affine(scale=np.float32), Affine),
    "uneven groups": (
        Affine(affine().codes, affine().scales, affine().zeros, 4, np.arange(256) // 100),
        Affine,
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_lowered_weight_has_the_same_values(name):
    weight, kind = LOWERED[name]
    low = lower(weight)
    assert isinstance(low.weight, kind)
    values = float32(to_dense(low.weight))
    if low.scales is not None:
        values = values * low.scales[:, None]
    if low.order is not None:
        values, sorted_ = np.empty_like(values), values
        values[:, low.order] = sorted_
    np.testing.assert_array_equal(values, weight.to_dense())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", LOWERED)
def test_linears_and_tables_have_the_values_of_the_weights(name, with_bias):
    weight, _ = LOWERED[name]
    random = np.random.default_rng(3)
    kernels = CpuKernels(threads=1)
    dense = random.standard_normal((24, 256)).astype(np.float32)
    weights = [weight, weight.rows(3, 20), dense, weight]  # of one kind, of another between them
    values = np.concatenate([float32(to_dense(part)) for part in weights])
    biases = [random.standard_normal(len(part)).astype(np.float32) for part in weights] if with_bias else None
    packed = kernels.pack_linear(weights, biases)
    x = random.standard_normal((7, 256)).astype(np.float32)
    expected = x @ values.T + (np.concatenate(biases) if biases else 0)
    assert abs(kernels.linear(x, packed) - expected).max() < 2e-4 * abs(expected).max()
    ids = random.integers(0, len(weight), 50)
    table = kernels.pack_linear([weight])
    np.testing.assert_array_equal(kernels.embedding(ids, table), weight.to_dense()[ids])
    with pytest.raises(IndexError, match="outside the vocabulary"):
        kernels.embedding(np.array([len(weight)]), table)
    for rows in (1, 3):
        np.testing.assert_array_equal(
            kernels.linear(x[:rows].copy(), packed), kernels.linear(x, packed)[:rows]
        )


@pytest.mark.parametrize(
    ("weight", "most"),
    [
        (affine(n=256, k=512), 0.6),
        (affine(symmetric=False, n=256, k=512), 0.75),
        (affine(symmetric=False, n=256, k=512, order=True), 0.75),
        (int8(n=256, k=512), 1.15),
        (float8((1, 512), n=480, k=512), 2.1),
    ],
)
def test_memory_is_near_to_that_of_the_file(weight, most):
    assert CpuKernels(threads=1).pack_linear([weight]).nbytes() < most * weight.codes.size


def test_tables_hold_what_torch_reads():
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(E4M3, codes.view(torch.float8_e4m3fn).float().numpy())
