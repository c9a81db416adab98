"""Triton's norms, activations, rotation with KV write and block copies, in its interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from caches import poisoned_cache
from tensors import OnTensors

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from paged_backend.kernels.kv_cache import LayerCache, quantize
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.tensor import as_tensor
from paged_backend.kernels.triton.backend import TritonKernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REFERENCE = OnTensors(ReferenceKernels())


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of the result; the interpreter truncates to bfloat16 where GPUs round."""
    unit = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 20, 576, 1000])
def test_rms_norm_alone_and_with_the_residual(dtype: str, d: int) -> None:
    kernels, kind = TritonKernels("cpu", dtype), DTYPES[dtype]
    x, residual, weight = torch.randn(3, d).to(kind), torch.randn(3, d).to(kind), torch.randn(d)
    close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight, 1e-5))
    heads = torch.randn(2, 2, d).to(kind)
    close(kernels.rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads.float(), weight, 1e-5))
    total = (x.float() + residual.float()).to(kind)
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    close(residual, total)
    close(out, REFERENCE.rms_norm(residual.float(), weight, 1e-6))


def test_norms_of_what_does_not_fit_are_refused() -> None:
    kernels = TritonKernels("cpu", "float32")
    with pytest.raises(ValueError, match="16384"):
        kernels.rms_norm(torch.zeros(1, 16385), torch.zeros(16385), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.add_rms_norm(torch.zeros(2, 4), torch.zeros(4, 2).T, torch.zeros(4), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_and_mul(dtype: str, activation: str) -> None:
    kernels = TritonKernels("cpu", dtype)
    for d in (5, 1100):
        x = (torch.randn(2, 2 * d) * 4).to(DTYPES[dtype])
        x[0, 0], x[1, 0] = 80.0, -80.0  # both ends saturate
        close(kernels.act_and_mul(x, activation), REFERENCE.act_and_mul(x.float(), activation))
    x[1, 3] = float("nan")
    assert kernels.act_and_mul(x, activation).isnan().nonzero().tolist() == [[1, 3]]
    with pytest.raises(ValueError, match="relu"):
        kernels.act_and_mul(x, "relu")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(9, 3, 64, 64), (4, 4, 80, 32), (2, 1, 20, 20), (2, 2, 8, 6)]
)
@pytest.mark.parametrize(
    ("block_size", "tokens", "dtype", "kv"),
    [
        (4, 9, "float32", "float32"),
        (16, 1, "float32", "bfloat16"),
        (32, 9, "bfloat16", "bfloat16"),
        (16, 9, "float16", "float16"),
    ],
)
def test_rotary_and_cache(
    heads: int, kv_heads: int, dim: int, rotated: int, block_size: int, tokens: int, dtype: str, kv: str
) -> None:
    kernels = TritonKernels("cpu", dtype)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(DTYPES[dtype])
    wide = qkv.float().clone()
    angles = torch.randn(tokens, rotated // 2)
    slots = torch.randperm(12 * block_size)[:tokens]

    def run(which, tensor, cache_type):  # type: ignore[no-untyped-def]
        cache = LayerCache(
            torch.full((12, kv_heads, dim, block_size), float("nan"), dtype=cache_type),
            torch.full((12, kv_heads, block_size, dim), float("nan"), dtype=cache_type),
        )
        q, k, v = tensor[:, :heads], tensor[:, heads : heads + kv_heads], tensor[:, heads + kv_heads :]
        which.rotary_and_cache(q, k, v, angles.cos(), angles.sin(), cache, slots)
        return cache

    cache, expected = run(kernels, qkv, DTYPES[kv]), run(REFERENCE, wide, torch.float32)
    close(qkv, wide)
    assert torch.equal(cache.key.isnan(), expected.key.isnan())  # what was not to be written was not
    assert torch.equal(cache.value.isnan(), expected.value.isnan())
    block, offset = slots // block_size, slots % block_size
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    close(cache.key[block, :, :, offset], k)
    close(cache.value[block, :, offset], v)
    if dtype == kv:  # then nothing is rounded on the way
        assert torch.equal(cache.key[block, :, :, offset], k)
        assert torch.equal(cache.value[block, :, offset], v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(9, 3, 64, 64), (4, 4, 80, 32), (2, 1, 20, 20), (2, 2, 8, 6)]
)
@pytest.mark.parametrize(
    ("size", "tokens", "dtype"), [(4, 9, "float32"), (16, 1, "bfloat16"), (16, 9, "float16")]
)
def test_codes_and_scales_are_those_of_the_rotated_heads(
    heads: int, kv_heads: int, dim: int, rotated: int, size: int, tokens: int, dtype: str
) -> None:
    kernels = TritonKernels("cpu", dtype)
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim) * torch.logspace(-3, 3, tokens)[:, None, None]).to(
        DTYPES[dtype]
    )
    if tokens > 1:
        qkv[1], qkv[2, -1, 3], qkv[3, heads, dim - 1] = 0, float("nan"), float("inf")
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    angles, slots = torch.randn(tokens, rotated // 2), torch.randperm(12 * size)[:tokens]
    cache = poisoned_cache(12, kv_heads, dim, size, torch.int8)
    before = cache.map(torch.clone)
    kernels.rotary_and_cache(q, k, v, angles.cos(), angles.sin(), cache, slots)
    block, offset = slots // size, slots % size
    for x, codes, scale in ((k, before.key.mT, before.key_scale), (v, before.value, before.value_scale)):
        codes[block, :, offset], scale[block, :, offset] = map(as_tensor, quantize(x.float().numpy()))
    for written, expected in zip(cache.parts, before.parts, strict=True):
        assert torch.equal(written.view(torch.int8), expected.view(torch.int8))


def test_heads_that_are_not_contiguous_are_refused() -> None:
    kernels = TritonKernels("cpu", "float32")
    q = torch.zeros(3, 8, 4).transpose(1, 2)
    cache = kernels.empty_cache(1, 2, 4, 8, 16)[0]
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rotary_and_cache(q, q, q, torch.ones(3, 4), torch.ones(3, 4), cache, torch.arange(3))


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_copy_blocks_copies_every_part_of_every_layer_and_nothing_else(dtype: str) -> None:
    kernels = TritonKernels("cpu", "float32")
    caches = kernels.empty_cache(3, 6, 2, 40, 16, dtype)
    for cache in caches:
        for part in cache.parts:
            part.copy_(torch.randint(-128, 128, part.shape))
    before = [cache.map(torch.clone) for cache in caches]
    kernels.copy_blocks(caches, [(1, 4), (2, 5)])
    kernels.copy_blocks(caches, [])
    origin = torch.tensor([0, 1, 2, 3, 1, 2])
    for cache, old in zip(caches, before):
        for now, then in zip(cache.parts, old.parts, strict=True):
            assert torch.equal(now, then[origin])


def test_blocks_of_odd_sizes_are_refused() -> None:
    kernels = TritonKernels("cpu", "bfloat16")
    with pytest.raises(ValueError, match="4 bytes"):
        kernels.copy_blocks(kernels.empty_cache(1, 3, 1, 5, 1, "bfloat16"), [(1, 2)])
