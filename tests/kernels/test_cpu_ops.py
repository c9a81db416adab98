"""The small C operations against torch formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tensors import OnTensors

from paged_backend.kernels.kv_cache import LayerCache


@pytest.fixture(autouse=True)
def _two_threads(threads: Callable[[int], None]) -> None:
    threads(2)


@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (70, 576), (4, 5, 64), (2, 3, 20)])
def test_rms_norm(kernels: OnTensors, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 576), (65, 577), (300, 40)])
def test_add_rms_norm_changes_the_residual_and_normalises_it(
    kernels: OnTensors, shape: tuple[int, int]
) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)


def test_rms_norm_takes_a_strided_view(kernels: OnTensors) -> None:
    qkv, weight = torch.randn(5, 3 * 32), torch.randn(32)
    x = qkv.view(5, 3, 32)[:, :2]
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), kernels.rms_norm(x.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 66), (70, 3072)])
def test_act_and_mul(kernels: OnTensors, activation: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 4
    gate, up = x.double().chunk(2, -1)
    expected = {
        "silu": F.silu(gate),
        "gelu": F.gelu(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
    }[activation] * up
    torch.testing.assert_close(kernels.act_and_mul(x, activation).double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_over_the_whole_range(kernels: OnTensors, activation: str) -> None:
    gate = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([-1e30, -3e4, 0.0, 3e4, 1e30])])
    x = torch.stack([gate, torch.ones_like(gate)], 1)
    out = kernels.act_and_mul(x.view(-1, 2), activation)[:, 0].double()
    gate = gate.double()
    function = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}[
        activation
    ]
    torch.testing.assert_close(out, function(gate), rtol=1e-6, atol=1e-6)
    x[7, 0] = float("nan")
    assert kernels.act_and_mul(x, activation)[:, 0].isnan().nonzero().flatten().tolist() == [7]


def test_unknown_activation_is_refused(kernels: OnTensors) -> None:
    with pytest.raises(ValueError, match="relu"):
        kernels.act_and_mul(torch.randn(2, 4), "relu")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(9, 3, 64, 64), (4, 4, 80, 32), (2, 1, 20, 20)]
)
@pytest.mark.parametrize(
    ("block_size", "tokens", "dtype"),
    [
        (4, 37, torch.float32),
        (16, 1, torch.bfloat16),
        (16, 37, torch.bfloat16),
        (32, 1, torch.float32),
        (32, 37, torch.float32),
    ],
)
def test_rotary_and_cache(
    kernels: OnTensors,
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    block_size: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(tokens, width)
    q, k, v = (
        part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    angles = torch.randn(tokens, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    cache = LayerCache(
        torch.full((12, kv_heads, dim, block_size), float("nan"), dtype=dtype),
        torch.full((12, kv_heads, block_size, dim), float("nan"), dtype=dtype),
    )
    slots = torch.randperm(12 * block_size)[:tokens]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = rotated // 2
        a, b, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    expected_q, expected_k, expected_v = rotate(q), rotate(k), v.clone()
    kernels.rotary_and_cache(q, k, v, cos, sin, cache, slots)
    torch.testing.assert_close(q, expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(k, expected_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(v, expected_v)
    block, offset = slots // block_size, slots % block_size
    assert torch.equal(cache.key[block, :, :, offset], k.to(dtype))
    assert torch.equal(cache.value[block, :, offset], v.to(dtype))
    assert cache.key.isnan().sum() == cache.key.numel() - tokens * kv_heads * dim
    assert cache.value.isnan().sum() == cache.value.numel() - tokens * kv_heads * dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_copy_blocks_copies_every_part_of_every_layer(kernels: OnTensors, dtype: str) -> None:
    caches = kernels.empty_cache(3, 6, 2, 8, 16, dtype)
    for cache in caches:
        for part in cache.parts:
            part.copy_(torch.randint(-128, 128, part.shape))
    before = [cache.map(torch.clone) for cache in caches]
    kernels.copy_blocks(caches, [(1, 4), (2, 5)])
    kernels.copy_blocks(caches, [])
    for cache, old in zip(caches, before):
        for now, then in zip(cache.parts, old.parts, strict=True):
            assert torch.equal(now[[4, 5]], then[[1, 2]])
            assert torch.equal(now[:4], then[:4])
