"""C linear and embedding against fp64 products; bit-for-bit independence of batch, tile and thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packing import pack
from tensors import OnTensors

# N not a multiple of a panel, K odd, one panel exactly, more than one row block
EXACT, INTEGER = ["float32", "bfloat16"], ["int8", "int4"]
SHAPES = [(1, 1), (5, 7), (48, 64), (100, 37), (250, 129), (577, 192)]


def _weights(n: int, k: int, dtype: str) -> torch.Tensor:
    weight = torch.randn(n, k)
    return weight.bfloat16() if dtype == "bfloat16" else weight


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_equals_the_fp64_product(kernels: OnTensors, n: int, k: int, dtype: str) -> None:
    weight, bias = _weights(n, k, dtype), torch.randn(n)
    cut = n // 3
    packed = pack(kernels, [weight[:cut], weight[cut:]], [None, bias[cut:]], dtype)
    bias[:cut] = 0
    for m in (1, 2, 3, 7, 64, 150):
        x = torch.randn(m, k)
        expected = x.double() @ weight.double().T + bias
        out = kernels.linear(x, packed)
        error = (out - expected).abs() / (x.double().abs() @ weight.double().abs().T + bias.abs())
        assert out.shape == (m, n)
        assert error.max() < 1e-6


@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (100, 1500)])
def test_integer_weights_multiply_like_what_they_stand_for(
    kernels: OnTensors, n: int, k: int, dtype: str
) -> None:
    weight, bias = torch.randn(n, k), torch.randn(n)
    packed = pack(kernels, [weight[: n // 3], weight[n // 3 :]], [None, bias[n // 3 :]], dtype)
    bias[: n // 3] = 0
    stored = kernels.embedding(torch.arange(n), packed)
    step = weight.abs().amax(1, keepdim=True) / 127
    if dtype == "int8":
        assert ((stored - weight).abs() <= step * 0.501).all()
    else:
        assert (stored - weight).norm() <= 0.085 * weight.norm() + step.norm()
    for m in (1, 2, 7, 16, 17, 33, 150):
        x = torch.randn(m, k) * torch.rand(m, 1) * 100
        x[m // 2] = 0
        expected = x.double() @ stored.double().T + bias
        error = (kernels.linear(x, packed) - expected).abs()
        # activations have 14 bits: each is off by at most half a step of its row
        bound = (
            x.abs().amax(1, keepdim=True) / 8191 * 0.51 * stored.abs().sum(1) + 1e-5 * expected.abs() + 1e-6
        )
        assert (error <= bound).all()


def test_int4_weights_have_a_zero_point_of_their_own(kernels: OnTensors) -> None:
    weight = torch.rand(40, 96) + 3.0
    stored = kernels.embedding(torch.arange(40), pack(kernels, [weight], dtype="int4"))
    assert (stored - weight).abs().max() < 4.0 / 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int4_group_is_no_worse_than_its_plain_range(kernels: OnTensors, dtype: torch.dtype) -> None:
    weight = (torch.randn(37, 32 * 5) ** 3).to(dtype)  # long tails, where a smaller range pays
    packed = pack(kernels, [weight[:5], weight[5:]], dtype="int4")  # the second begins within a panel
    stored = kernels.embedding(torch.arange(37), packed)
    units = weight.float() / (weight.float().abs().amax(1, keepdim=True) / 127)
    groups = units.view(37, 5, 32)
    high, low = groups.amax(2, keepdim=True).clamp(min=0), groups.amin(2, keepdim=True).clamp(max=0)
    step = ((high - low) / 15 * 256 + 0.5).int().clamp(min=1)
    offset = (low * 256 + 0.5).floor().int()
    q = ((groups * 256 - offset) / step + 0.5).int().clamp(0, 15)
    plain = (q * step + offset + 128) >> 8

    def squared(values: torch.Tensor) -> torch.Tensor:
        return (values.view(37, 5, 32) - groups).square().sum(2)

    scale = weight.float().abs().amax(1, keepdim=True) / 127
    ours = squared(stored / scale)
    assert (ours <= squared(plain.float()) * 1.0001 + 1e-3).all()
    assert ours.mean() < squared(plain.float()).mean()


def test_integer_weights_of_zero_stay_zero(kernels: OnTensors) -> None:
    weight = torch.randn(50, 70)
    weight[7] = 0
    for dtype in INTEGER:
        packed = pack(kernels, [weight], dtype=dtype)
        assert (kernels.linear(torch.randn(3, 70), packed)[:, 7] == 0).all()
        assert (kernels.embedding(torch.tensor([7]), packed) == 0).all()


def test_small_weights_take_small_memory(kernels: OnTensors) -> None:
    weight = torch.randn(480, 576)
    bits = {d: pack(kernels, [weight], None, d).nbytes() * 8 / weight.numel() for d in (*EXACT, *INTEGER)}
    assert bits["float32"] == 32
    assert bits["bfloat16"] == 16
    assert bits["int8"] < 8.1
    assert bits["int4"] < 5.1


@pytest.mark.parametrize("dtype", [*EXACT, *INTEGER])
@pytest.mark.parametrize("k", [333, 1200])
def test_a_row_is_the_same_bits_in_every_batch_and_on_two_threads(
    kernels: OnTensors, threads: Callable[[int], None], dtype: str, k: int
) -> None:
    packed = pack(kernels, [_weights(205, k, dtype)], None, dtype)
    x = torch.randn(300, k)
    whole = kernels.linear(x, packed)
    for count in (2, 1):
        threads(count)
        assert torch.equal(kernels.linear(x, packed), whole)
        for m in range(1, 71):
            start = int(torch.randint(0, 300 - m, ()))
            assert torch.equal(kernels.linear(x[start : start + m], packed), whole[start : start + m]), m


def test_denormal_numbers_are_kept_whatever_the_thread_does_with_them(
    kernels: OnTensors, threads: Callable[[int], None]
) -> None:
    packed = pack(kernels, [torch.full((205, 1200), 1e-21)], dtype="float32")
    x = torch.full((300, 1200), 1e-21)
    threads(2)
    expected = kernels.linear(x, packed)
    assert 0 < expected[0, 0] < torch.finfo(torch.float32).tiny
    torch.set_flush_denormal(True)
    try:
        found = kernels.linear(x, packed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_storage_is_chosen_so_that_nothing_is_lost(kernels: OnTensors) -> None:
    exact = torch.randn(64, 40).bfloat16()
    assert pack(kernels, [exact]).dtype == "bfloat16"
    assert pack(kernels, [exact.float()]).dtype == "bfloat16"
    assert pack(kernels, [exact, torch.randn(3, 40)]).dtype == "float32"
    half = torch.randn(64, 40).half()
    packed = pack(kernels, [half])
    assert packed.dtype == "float32"
    assert torch.equal(kernels.embedding(torch.arange(64), packed), half.float())


def test_rounding_to_bf16_equals_torch(kernels: OnTensors) -> None:
    weight = torch.randn(70, 51)
    weight[3, 5], weight[4, 6] = float("inf"), 0.0
    packed = pack(kernels, [weight], dtype="bfloat16")
    assert torch.equal(kernels.embedding(torch.arange(70), packed), weight.bfloat16().float())
    assert packed.nbytes() < weight.nbytes


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_embedding_returns_rows(kernels: OnTensors, n: int, k: int, dtype: str) -> None:
    weight = _weights(n, k, dtype)
    packed = pack(kernels, [weight], None, dtype)
    ids = torch.randint(0, n, (17,))
    assert torch.equal(kernels.embedding(ids, packed), weight[ids].float())
    with pytest.raises(IndexError, match=f"{n} is outside"):
        kernels.embedding(torch.tensor([0, n]), packed)


@pytest.mark.parametrize("dtype", [*EXACT, *INTEGER])
def test_non_finite_inputs_stay_in_their_row(kernels: OnTensors, dtype: str) -> None:
    packed = pack(kernels, [_weights(60, 33, dtype)], None, dtype)
    x = torch.randn(9, 33)
    clean = kernels.linear(x, packed)
    x[4, 7] = float("nan")
    out = kernels.linear(x, packed)
    assert out[4].isnan().all()
    rest = [i for i in range(9) if i != 4]
    assert torch.equal(out[rest], clean[rest])


def test_wrong_arguments_are_named(kernels: OnTensors) -> None:
    packed = pack(kernels, [torch.randn(6, 8)])
    with pytest.raises(ValueError, match="9 features"):
        kernels.linear(torch.randn(2, 9), packed)
    with pytest.raises(ValueError, match="float64"):
        pack(kernels, [torch.randn(6, 8)], dtype="float64")
    with pytest.raises(ValueError, match="share K"):
        pack(kernels, [torch.randn(6, 8), torch.randn(6, 9)])
