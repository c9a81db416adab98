"""Products of bf16 weights with activations of fewer bits: how far off, and independent of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packing import pack
from tensors import OnTensors

from paged_backend.config import EngineConfig
from paged_backend.kernels.cpu.backend import CpuKernels

BITS = {"highest": 24, "high": 16, "medium": 8}


@pytest.fixture(scope="module", params=BITS)
def precise(request: pytest.FixtureRequest, library: Path) -> tuple[OnTensors, int]:
    return OnTensors(CpuKernels(2, library, request.param)), BITS[request.param]


@pytest.mark.parametrize(("n", "k"), [(5, 7), (100, 37), (250, 129), (577, 192)])
def test_an_activation_keeps_its_bits(precise: tuple[OnTensors, int], n: int, k: int) -> None:
    kernels, bits = precise
    weight, bias = torch.randn(n, k).bfloat16(), torch.randn(n)
    packed = pack(kernels, [weight], [bias], "bfloat16")
    for m in (1, 7, 16, 33):
        x = torch.randn(m, k)
        expected = x.double() @ weight.double().T + bias
        size = x.double().abs() @ weight.double().abs().T + bias.abs()
        assert ((kernels.linear(x, packed) - expected).abs() <= (2.0**-bits + 1e-6) * size).all()


def test_activations_of_that_many_bits_are_multiplied_exactly(precise: tuple[OnTensors, int]) -> None:
    kernels, bits = precise
    step = 2.0 ** (1 - min(bits, 12))
    x = torch.randint(-(2 ** (min(bits, 12) - 1)), 2 ** (min(bits, 12) - 1) + 1, (20, 70)).float() * step
    weight = torch.randint(-8, 9, (60, 70)).bfloat16()
    packed = pack(kernels, [weight], dtype="bfloat16")
    assert torch.equal(kernels.linear(x, packed), x @ weight.float().T)


def test_rows_do_not_depend_on_their_neighbours(precise: tuple[OnTensors, int]) -> None:
    kernels, _ = precise
    packed = pack(kernels, [torch.randn(200, 321)], dtype="bfloat16")
    x = torch.randn(70, 321)
    whole = kernels.linear(x, packed)
    for rows in (slice(0, 1), slice(3, 8), slice(10, 27), slice(0, 64), slice(69, 70)):
        assert torch.equal(kernels.linear(x[rows], packed), whole[rows])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 20])
def test_fewer_bits_are_used_just_where_bfloat16_is_multiplied(library: Path, rows: int) -> None:
    x, weight = torch.randn(rows, 71), torch.randn(60, 71)
    highest, medium = (OnTensors(CpuKernels(1, library, name)) for name in ("highest", "medium"))
    packed = pack(highest, [weight], dtype="bfloat16")
    if highest._lib.pb_bf16_products():
        torch.testing.assert_close(
            medium.linear(x, packed), highest.linear(x.bfloat16().float(), packed), rtol=1e-5, atol=1e-5
        )
        assert not torch.equal(medium.linear(x, packed), highest.linear(x, packed))
    else:
        assert torch.equal(medium.linear(x, packed), highest.linear(x, packed))


def test_infinities_and_nans_stay(precise: tuple[OnTensors, int]) -> None:
    kernels, _ = precise
    x = torch.ones(3, 40)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    out = kernels.linear(x, pack(kernels, [torch.ones(9, 40)], dtype="bfloat16"))
    assert out[0].isnan().all()
    assert (out[1] == float("inf")).all()
    assert (out[2] == 40).all()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "kernels": "reference"},
    ],
)
def test_where_it_could_do_nothing_it_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="leave dtype at 'auto' or 'bfloat16'"):
        EngineConfig("m", matmul_precision="medium", **options)


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="highest, high, medium"):
        CpuKernels(1, matmul_precision="low")
