"""Products with GGML's block formats as a file has them, against the gguf package's values in float64; bit for bit
independence of batch, tile and thread."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from tensors import OnTensors

from paged_backend.kernels.base import PackedLinear
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.blocks import BlockLinear
from paged_backend.kernels.ggml import GGML_TYPES
from paged_backend.kernels.weights import GGMLBlocks

# what of a block is fp16, by byte
SMALL = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": []}
LARGE = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0]}
FORMATS = [*SMALL, *LARGE]


def _file(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """uint8 [n, bytes of a row]: every code and small scale there is, of either sign where the format has signs."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (n * k // values, size), np.uint8)
    for at in {**SMALL, **LARGE}[name]:
        raw[:, at : at + 2] = rng.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        raw[:, 0] = rng.integers(118, 130, len(raw))
        raw[:2, 0] = [0, 1]  # denormal scales
    return raw.reshape(n, -1)


def _values(raw: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]), np.float64)


class _Matrix:
    """Packed by some kernels, which multiply it."""

    def __init__(self, kernels: CpuKernels, packed: PackedLinear) -> None:
        self.kernels, self.packed = kernels, packed

    def linear(self, x: np.ndarray, bits: int = 16) -> np.ndarray:
        """bits: of an activation; 8 is the precision ``medium``."""
        self.kernels._bits = bits
        try:
            return self.kernels.linear(x, self.packed)
        finally:
            self.kernels._bits = 16

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self.kernels.embedding(np.ascontiguousarray(ids), self.packed)

    def nbytes(self) -> int:
        return self.packed.nbytes()


def _blocks(raw: np.ndarray, name: str, k: int) -> GGMLBlocks:
    return GGMLBlocks(raw.reshape(-1), GGML_TYPES[int(gguf.GGMLQuantizationType[name])], (len(raw), k))


def _pack(
    kernels: OnTensors, parts: list[np.ndarray], name: str, k: int, bias: np.ndarray | None = None
) -> _Matrix:
    biases = None if bias is None else np.split(bias, np.cumsum([len(part) for part in parts])[:-1])
    weights = [_blocks(part, name, k) for part in parts]
    packed = kernels.kernels.pack_linear(weights, biases)
    assert isinstance(packed, BlockLinear)
    return _Matrix(kernels.kernels, packed)


def _shapes(name: str) -> list[tuple[int, int]]:
    """Panels not filled, one output, several blocks, and where a block is small a last one that is not whole."""
    return [(1, 256), (37, 768)] + ([(70, 288), (33, 32)] if name in SMALL else [(70, 512)])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_values_of_the_format_bit_for_bit(kernels: OnTensors, name: str) -> None:
    for n, k in _shapes(name):
        raw = _file(name, n, k)
        found = _pack(kernels, [raw[: n // 3], raw[n // 3 :]], name, k).rows(np.arange(n)[::-1])
        assert np.array_equal(found, _values(raw, name)[::-1].astype(np.float32))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_format_s_values(kernels: OnTensors, name: str, bits: int) -> None:
    rng = np.random.default_rng(1)
    for n, k in _shapes(name):
        raw, bias = _file(name, n, k), rng.standard_normal(n, np.float32)
        weight = _values(raw, name)
        packed = _pack(kernels, [raw[: n // 3], raw[n // 3 :]], name, k, bias)
        for m in (1, 2, 3, 5, 13, 30):
            x = rng.standard_normal((m, k), np.float32) * rng.random((m, 1), np.float32) * 100
            x[m // 2] = 0
            x[:, k // 2] *= 50
            expected = x.astype(np.float64) @ weight.T + bias
            # each activation is off by at most half a step of those that share its scale
            shared, largest = {16: (256, 32639), 8: (32, 127)}[bits]
            most = np.maximum.reduceat(abs(x), range(0, k, shared), axis=1)
            step = np.repeat(most, shared, axis=1)[:, :k] / largest
            bound = step * 0.51 @ abs(weight).T + 2e-6 * (abs(x) @ abs(weight).T + abs(bias)) + 1e-30
            assert (abs(packed.linear(x, bits) - expected) <= bound).all(), (n, k, m)


@pytest.mark.parametrize("name", FORMATS)
def test_activations_are_as_good_as_their_bits(kernels: OnTensors, name: str) -> None:
    raw = _file(name, 96, 1024)
    weight, x = _values(raw, name), np.random.default_rng(2).standard_normal((20, 1024), np.float32)
    expected = x @ weight.T
    packed = _pack(kernels, [raw], name, 1024)
    assert np.linalg.norm(packed.linear(x) - expected) < 6e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(packed.linear(x, 8) - expected) < 1.5e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_that_of_the_file(kernels: OnTensors, name: str) -> None:
    raw = _file(name, 96, 1024)
    assert _pack(kernels, [raw], name, 1024).nbytes() <= 1.06 * raw.nbytes


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_bits_in_every_batch_and_on_two_threads(
    kernels: OnTensors, threads: Callable[[int], None], name: str, bits: int
) -> None:
    k = 800 if name in SMALL else 768
    raw, rng = _file(name, 205, k), np.random.default_rng(3)
    x = rng.standard_normal((250, k), np.float32)
    whole = _pack(kernels, [raw], name, k).linear(x, bits)
    for count in (2, 1):
        threads(count)
        packed = _pack(kernels, [raw], name, k)
        assert np.array_equal(packed.linear(x, bits), whole)
        for m in (*range(1, 31), 64, 121):
            start = int(rng.integers(0, 250 - m))
            assert np.array_equal(packed.linear(x[start : start + m], bits), whole[start : start + m]), m


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_numbers_that_are_not_finite_stay_in_their_row(kernels: OnTensors, name: str) -> None:
    packed = _pack(kernels, [_file(name, 60, 512)], name, 512)
    x = np.random.default_rng(4).standard_normal((9, 512), np.float32)
    clean = packed.linear(x)
    x[4, 7], x[6, 300] = np.nan, np.inf
    out = packed.linear(x)
    assert np.isnan(out[4]).all()
    assert not np.isfinite(out[6]).any()
    rest = [0, 1, 2, 3, 5, 7, 8]
    assert np.array_equal(out[rest], clean[rest])


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30])
def test_activations_may_be_of_any_size(kernels: OnTensors, size: float) -> None:
    raw = _file("Q4_K", 40, 256)
    x = np.random.default_rng(5).uniform(-1, 1, (3, 256)).astype(np.float32)
    packed = _pack(kernels, [raw], "Q4_K", 256)
    error = packed.linear(x * np.float32(size)) - packed.linear(x).astype(np.float64) * size
    assert abs(error).max() <= 1e-3 * size * abs(packed.linear(x)).max() + 1e-30


def test_scales_of_a_damaged_file_spread_no_further_than_their_outputs(kernels: OnTensors) -> None:
    for name in ("Q8_0", "Q4_K"):
        raw = _file(name, 40, 256)
        packed = _pack(kernels, [raw], name, 256)
        damaged = raw.copy()
        damaged[7, :2] = np.array([np.inf], np.float16).view(np.uint8)
        damaged[9, :2] = np.array([np.nan], np.float16).view(np.uint8)
        x = np.random.default_rng(6).standard_normal((2, 256), np.float32)
        out = _pack(kernels, [damaged], name, 256).linear(x)
        assert not np.isfinite(out[:, [7, 9]]).any()
        rest = [i for i in range(40) if i not in (7, 9)]
        assert np.array_equal(out[:, rest], packed.linear(x)[:, rest])


def test_no_rows_and_no_outputs_are_no_work(kernels: OnTensors) -> None:
    packed = _pack(kernels, [_file("Q4_K", 40, 256)], "Q4_K", 256)
    assert packed.linear(np.empty((0, 256), np.float32)).shape == (0, 40)
    assert packed.rows(np.empty(0, np.int64)).shape == (0, 256)


def test_wrong_arguments_are_named(kernels: OnTensors) -> None:
    raw = _file("Q4_K", 6, 256)
    packed = _pack(kernels, [raw], "Q4_K", 256)
    with pytest.raises(ValueError, match=r"the weights take \[T, 256\]"):
        packed.linear(np.zeros((2, 255), np.float32))
    with pytest.raises(TypeError, match="float64"):
        packed.linear(np.zeros((2, 256)))
    with pytest.raises(IndexError, match="token id 6 is outside the vocabulary of 6"):
        packed.rows(np.array([0, 6]))


def test_matrices_of_several_formats_are_one_linear(kernels: OnTensors) -> None:
    """As files have them: the values of a layer in more bits than its queries and keys; some matrix not quantised."""
    rng, native = np.random.default_rng(7), kernels.kernels
    parts = [_blocks(_file("Q4_K", 40, 256), "Q4_K", 256), _blocks(_file("Q6_K", 24, 256, 1), "Q6_K", 256)]
    weights = [*parts, rng.standard_normal((8, 256), np.float32)]
    biases = [rng.standard_normal(len(w), np.float32) for w in weights[:2]] + [None]
    x = rng.standard_normal((5, 256), np.float32)
    together = native.linear(x, native.pack_linear(weights, biases))
    apart = [native.linear(x, native.pack_linear([w], [b])) for w, b in zip(weights, biases)]
    assert np.array_equal(together, np.concatenate(apart, axis=1))


def test_a_format_that_no_kernel_multiplies_is_expanded(kernels: OnTensors) -> None:
    native = kernels.kernels
    raw = np.random.default_rng(8).integers(0, 100, (4, 54), np.uint8)
    weight, x = _blocks(raw, "TQ1_0", 256), np.random.default_rng(9).standard_normal((3, 256), np.float32)
    assert np.array_equal(
        native.linear(x, native.pack_linear([weight])),
        native.linear(x, native.pack_linear([weight.to_dense()])),
    )
