"""Triton's integer products, in its interpreter, and the dense ones beside them, against what the weights stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from packing import pack
from tensors import OnTensors

from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.triton.backend import TritonKernels

INTEGER = ["int8", "int4"]
# N not a multiple of a tile, K odd, a tile exactly, more than one tile either way
SHAPES = [(1, 1), (5, 7), (48, 64), (100, 37), (70, 129)]


def _packed(kernels: TritonKernels, n: int, k: int, dtype: str):  # type: ignore[no-untyped-def]
    """A packed matrix in two parts, one with a bias; what it stands for; the bias of all."""
    weight, bias = torch.randn(n, k), torch.randn(n)
    cut = n // 3
    packed = pack(kernels, [weight[:cut], weight[cut:]], [None, bias[cut:]], dtype)
    bias[:cut] = 0
    return weight, packed, kernels.embedding(torch.arange(n), packed), bias


@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_integer_weights_multiply_like_what_they_stand_for(n: int, k: int, dtype: str) -> None:
    kernels = TritonKernels("cpu", "float32")
    weight, packed, stored, bias = _packed(kernels, n, k, dtype)
    if dtype == "int8":
        assert ((stored - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    else:
        assert (stored - weight).norm() <= 0.085 * weight.norm() + 0.01
    for m in (1, 16, 17):
        x = torch.randn(m, k) * torch.rand(m, 1) * 100
        expected = x.double() @ stored.double().T + bias
        bound = x.abs().double() @ stored.abs().double().T + bias.abs()
        out = kernels.linear(x, packed)
        assert out.shape == (m, n)
        assert ((out - expected).abs() <= 2e-6 * bound + 1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (250, 129), (577, 192), (100, 1500)])
def test_integer_products_on_the_grid_of_the_c_kernels(n: int, k: int, dtype: str, activations: str) -> None:
    kernels = TritonKernels("cpu", activations)
    _, packed, stored, bias = _packed(kernels, n, k, dtype)
    unit = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}[activations]  # the interpreter truncates
    for m in (1, 2, 7, 16, 17, 33, 64, 65, 150):
        x = torch.randn(m, k).to(kernels.torch_dtype)
        expected = x.double() @ stored.double().T + bias
        bound = x.abs().double() @ stored.abs().double().T + bias.abs()
        # a product is off by what its weights, those it is compared with and its result were rounded by
        assert ((kernels.linear(x, packed) - expected).abs() <= 2.5 * unit * bound + 1e-9).all()


@pytest.mark.parametrize("activations", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", INTEGER)
def test_half_precision_activations(dtype: str, activations: str) -> None:
    kernels = TritonKernels("cpu", activations)
    _, packed, stored, bias = _packed(kernels, 40, 70, dtype)
    for m in (3, 17, 65):
        x = torch.randn(m, 70).to(kernels.torch_dtype)
        out = kernels.linear(x, packed)
        assert out.dtype == kernels.torch_dtype
        torch.testing.assert_close(out.float(), x.float() @ stored.float().T + bias, rtol=3e-2, atol=0.2)


@pytest.mark.parametrize("dtype", INTEGER)
def test_a_row_is_the_same_bits_in_every_batch_of_its_class(dtype: str) -> None:
    kernels = TritonKernels("cpu", "bfloat16")
    packed = pack(kernels, [torch.randn(40, 500)], None, dtype)  # more than one tile of every class
    x = torch.randn(150, 500).bfloat16()
    for most, parts in ((16, [(0, 1), (3, 9), (15, 16)]), (64, [(0, 17), (30, 64)]), (150, [(20, 85)])):
        together = kernels.linear(x[:most], packed)
        for start, stop in parts:
            assert torch.equal(kernels.linear(x[start:stop], packed), together[start:stop])


@pytest.mark.parametrize("dtype", INTEGER)
def test_non_finite_inputs_stay_in_their_row(dtype: str) -> None:
    kernels = TritonKernels("cpu", "float32")
    packed = pack(kernels, [torch.randn(20, 33)], None, dtype)
    x = torch.randn(9, 33)
    clean = kernels.linear(x, packed)
    x[4, 7] = float("nan")
    out = kernels.linear(x, packed)
    assert out[4].isnan().all()
    rest = [i for i in range(9) if i != 4]
    assert torch.equal(out[rest], clean[rest])


def test_int4_weights_have_a_minimum_of_their_own_and_zeros_stay_zero() -> None:
    kernels = TritonKernels("cpu", "float32")
    weight = torch.rand(40, 96) + 3.0
    weight[7] = 0
    ids = torch.arange(40)
    for dtype in INTEGER:
        packed = pack(kernels, [weight], None, dtype)
        stored = kernels.embedding(ids, packed)
        assert (stored[7] == 0).all()
        assert (kernels.linear(torch.randn(3, 96), packed)[:, 7] == 0).all()
        # int4: the range of a group is at most 1, and so a step 1 / 15
        assert (stored - weight).abs().max() < (0.51 / 15 + 0.002 if dtype == "int4" else 0.51 * 4 / 127)


def test_small_weights_take_small_memory() -> None:
    kernels = TritonKernels("cpu", "bfloat16")
    weight = torch.randn(480, 576)
    bits = {d: pack(kernels, [weight], None, d).nbytes() * 8 / weight.numel() for d in ("auto", *INTEGER)}
    assert bits["auto"] == 16
    assert bits["int8"] < 8.1
    assert bits["int4"] < 5.1


def test_dense_weights_and_embeddings_equal_the_reference() -> None:
    ours, reference = TritonKernels("cpu", "float32"), OnTensors(ReferenceKernels())
    parts, biases = [torch.randn(8, 12), torch.randn(4, 12)], [None, torch.randn(4)]
    mine, theirs = pack(ours, parts, biases), pack(reference, parts, biases)
    x, ids = torch.randn(5, 12), torch.tensor([3, 3, 9, 0])
    torch.testing.assert_close(ours.linear(x, mine), reference.linear(x, theirs))
    assert torch.equal(ours.embedding(ids, mine), reference.embedding(ids, theirs))
    parts[0].fill_(float("nan"))  # packing copies, so that the source may go
    assert ours.linear(x, mine).isfinite().all()


def test_wrong_arguments_are_named() -> None:
    kernels = TritonKernels("cpu", "float32")
    packed = pack(kernels, [torch.randn(6, 8)])
    with pytest.raises(ValueError, match="9 features"):
        kernels.linear(torch.randn(2, 9), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        pack(kernels, [torch.randn(6, 8)], dtype="bfloat16")
    with pytest.raises(ValueError, match="share K"):
        pack(kernels, [torch.randn(6, 8), torch.randn(6, 9)])
    with pytest.raises(ValueError, match="float8"):
        TritonKernels("cpu", "float8")
    other = pack(OnTensors(ReferenceKernels()), [torch.randn(6, 8)])
    with pytest.raises(TypeError, match="ReferenceLinear"):
        kernels.linear(torch.randn(2, 8), other)
    with pytest.raises(TypeError, match="ReferenceLinear"):
        kernels.embedding(torch.tensor([1]), other)


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="device='cuda'"):
        TritonKernels("cpu", "float32")
