"""C linear and embedding against fp64 products; bit-for-bit independence of batch, tile and thread."""

from __future__ import annotations

import pytest
import torch
from paged_backend.kernels.cpu.backend import CpuKernels
from paged_backend.kernels.cpu.build import build

# N not a multiple of a panel, K odd, one panel exactly, more than one row block
SHAPES = [(1, 1), (5, 7), (48, 64), (100, 37), (250, 129), (577, 192)]


def _flags() -> list[tuple[str, ...] | None]:
    """The machine's own instruction set, AVX2 if it has that, and the portable code."""
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        return [None, ()]
    return [None, ("-mavx2", "-mfma"), ()]


@pytest.fixture(scope="module", params=_flags(), ids=lambda f: "native" if f is None else "-".join(f) or "generic")
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(1, build(request.param))


def _weights(n: int, k: int, dtype: str) -> torch.Tensor:
    weight = torch.randn(n, k)
    return weight.bfloat16() if dtype == "bfloat16" else weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_equals_the_fp64_product(kernels: CpuKernels, n: int, k: int, dtype: str) -> None:
    weight, bias = _weights(n, k, dtype), torch.randn(n)
    cut = n // 3
    packed = kernels.pack_linear([weight[:cut], weight[cut:]], [None, bias[cut:]], dtype)
    bias[:cut] = 0
    for m in (1, 2, 3, 7, 64, 150):
        x = torch.randn(m, k)
        expected = x.double() @ weight.double().T + bias
        out = kernels.linear(x, packed)
        error = (out - expected).abs() / (x.double().abs() @ weight.double().abs().T + bias.abs())
        assert out.shape == (m, n)
        assert error.max() < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_bits_in_every_batch_and_on_two_threads(kernels: CpuKernels, dtype: str) -> None:
    weight = _weights(205, 333, dtype)
    packed = kernels.pack_linear([weight], None, dtype)
    x = torch.randn(300, 333)
    whole = kernels.linear(x, packed)
    kernels.threads = 2
    try:
        assert torch.equal(kernels.linear(x, packed), whole)
        for m in range(1, 71):
            start = int(torch.randint(0, 300 - m, ()))
            for threads in (1, 2):
                kernels.threads = threads
                assert torch.equal(kernels.linear(x[start : start + m], packed), whole[start : start + m]), m
    finally:
        kernels.threads = 1


def test_storage_is_chosen_so_that_nothing_is_lost(kernels: CpuKernels) -> None:
    exact = torch.randn(64, 40).bfloat16()
    assert kernels.pack_linear([exact]).dtype == "bfloat16"
    assert kernels.pack_linear([exact.float()]).dtype == "bfloat16"
    assert kernels.pack_linear([exact, torch.randn(3, 40)]).dtype == "float32"
    half = torch.randn(64, 40).half()
    packed = kernels.pack_linear([half])
    assert packed.dtype == "float32"
    assert torch.equal(kernels.embedding(torch.arange(64), packed), half.float())


def test_rounding_to_bf16_equals_torch(kernels: CpuKernels) -> None:
    weight = torch.randn(70, 51)
    weight[3, 5], weight[4, 6] = float("inf"), 0.0
    packed = kernels.pack_linear([weight], dtype="bfloat16")
    assert torch.equal(kernels.embedding(torch.arange(70), packed), weight.bfloat16().float())
    assert packed.nbytes() < weight.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_embedding_returns_rows(kernels: CpuKernels, n: int, k: int, dtype: str) -> None:
    weight = _weights(n, k, dtype)
    packed = kernels.pack_linear([weight], None, dtype)
    ids = torch.randint(0, n, (17,))
    assert torch.equal(kernels.embedding(ids, packed), weight[ids].float())
    with pytest.raises(IndexError, match=f"{n} is outside"):
        kernels.embedding(torch.tensor([0, n]), packed)


def test_non_finite_inputs_stay_in_their_row(kernels: CpuKernels) -> None:
    packed = kernels.pack_linear([torch.randn(60, 33)])
    x = torch.randn(9, 33)
    clean = kernels.linear(x, packed)
    x[4, 7] = float("nan")
    out = kernels.linear(x, packed)
    assert out[4].isnan().all()
    rest = [i for i in range(9) if i != 4]
    assert torch.equal(out[rest], clean[rest])


def test_wrong_arguments_are_named(kernels: CpuKernels) -> None:
    packed = kernels.pack_linear([torch.randn(6, 8)])
    with pytest.raises(ValueError, match="9 features"):
        kernels.linear(torch.randn(2, 9), packed)
    with pytest.raises(ValueError, match="float64"):
        kernels.pack_linear([torch.randn(6, 8)], dtype="float64")
    with pytest.raises(ValueError, match="share K"):
        kernels.pack_linear([torch.randn(6, 8), torch.randn(6, 9)])
