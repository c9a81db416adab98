"""Keys and values in 8 bits: what is written is a function of the token alone, and is as near as a scale allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import poisoned_cache
from tensors import OnTensors

from paged_backend.kernels.array import Array, float32
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import LayerCache, quantize
from paged_backend.kernels.reference import ReferenceKernels

BLOCKS, HEADS, KV_HEADS = 12, 6, 2


def heads(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as views of one matrix; k and v with tokens of many sizes, and with zeros and what is not finite."""
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, dim) * torch.logspace(-30, 30, tokens)[:, None, None]
    qkv[tokens // 2] = 0
    qkv[1, -1, dim - 1], qkv[2, -1, 0], qkv[3, HEADS, 1] = float("nan"), float("inf"), float("-inf")
    return qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]


def write(
    kernels: OnTensors, parts: tuple[torch.Tensor, ...], angles: torch.Tensor, cache: LayerCache, slots: torch.Tensor,
    *chunks: torch.Tensor,
) -> None:  # fmt: skip
    """The rows of each chunk at a time; q, k and v stay as they are."""
    for rows in chunks:
        q, k, v = (part[rows] for part in parts)
        kernels.rotary_and_cache(q, k, v, angles[rows].cos(), angles[rows].sin(), cache, slots[rows])


def bits(cache: LayerCache) -> list[bytes]:
    return [part.view(torch.int8).numpy().tobytes() for part in cache.parts]


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 32), (20, 20), (5, 2)])
@pytest.mark.parametrize("size", [4, 16, 32])
def test_what_is_written_depends_on_the_token_alone(
    kernels: OnTensors, dim: int, rotated: int, size: int
) -> None:
    tokens = 37
    parts, angles = heads(tokens, dim), torch.randn(tokens, rotated // 2)
    slots, rows = torch.randperm(BLOCKS * size)[:tokens], torch.arange(tokens)
    empty = poisoned_cache(BLOCKS, KV_HEADS, dim, size, torch.int8)
    once, again, alone, shuffled = (empty.map(torch.clone) for _ in range(4))
    write(kernels, parts, angles, once, slots, rows)
    write(kernels, parts, angles, again, slots, rows, rows, rows[5:])
    write(kernels, parts, angles, alone, slots, *rows[:, None])
    write(kernels, parts, angles, shuffled, slots, torch.randperm(tokens))
    assert bits(once) != bits(empty)
    assert bits(once) == bits(again) == bits(alone) == bits(shuffled)


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 32), (20, 20), (5, 2)])
@pytest.mark.parametrize(("size", "tokens"), [(4, 37), (16, 37), (32, 6)])
def test_codes_and_scales_are_those_of_the_rotated_heads(
    kernels: OnTensors, dim: int, rotated: int, size: int, tokens: int
) -> None:
    q, k, v = heads(tokens, dim)
    angles, slots = torch.randn(tokens, rotated // 2), torch.randperm(BLOCKS * size)[:tokens]
    cache = poisoned_cache(BLOCKS, KV_HEADS, dim, size, torch.int8)
    expected = [part.clone().numpy() for part in cache.map(lambda part: part.view(part.dtype)).parts[:2]]
    kernels.rotary_and_cache(q, k, v, angles.cos(), angles.sin(), cache, slots)
    block, offset = (slots // size).numpy(), (slots % size).numpy()
    for x, codes, scale in (
        (k, expected[0].swapaxes(2, 3), cache.key_scale),
        (v, expected[1], cache.value_scale),
    ):
        codes[block, :, offset], scales = quantize(x.numpy())
        written = scale[block, :, offset].float().numpy()
        assert np.array_equal(written, float32(scales), equal_nan=True)
        assert scale.isnan().sum() == scale.numel() - np.isfinite(written).sum()
    assert np.array_equal(cache.key.numpy(), expected[0])
    assert np.array_equal(cache.value.numpy(), expected[1])


def test_codes_are_within_half_a_scale_and_scales_as_small_as_they_can_be() -> None:
    draw = np.random.default_rng(0).standard_normal
    x = (draw((200, 3, 64)) * np.logspace(-30, 35, 200)[:, None, None]).astype(np.float32)
    codes, scales = quantize(x)
    step = float32(scales).astype(np.float64)[..., None]
    assert (np.abs(codes * step - x) <= step * 0.500001).all()
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    assert (step >= largest / 127.00001).all()
    assert (step <= largest / 127 * (1 + 2**-7)).all()
    assert np.abs(codes).max() == 127


@pytest.mark.parametrize("x", [np.zeros(7), np.full(7, 1e-45), np.full(7, 3.4e38)])
def test_the_least_and_the_largest_numbers_have_codes(x: Array) -> None:
    codes, scales = quantize(x.astype(np.float32))
    assert np.abs(codes * float32(scales) - x).max() <= max(2**-8 * x.max(), 1e-40)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = np.ones((2, 4), np.float32)
    x[1, 2] = bad
    codes, scales = quantize(x)
    assert np.isfinite(float32(scales)).tolist() == [True, False]
    assert not codes[1].any()


@pytest.mark.parametrize("size", [8, 16])
def test_attention_is_near_that_over_a_float32_cache(kernels: OnTensors, size: int) -> None:
    length, dim = 150, 64
    reference = OnTensors(ReferenceKernels())
    q, k, v = (
        torch.randn(length, HEADS, dim),
        torch.randn(length, KV_HEADS, dim),
        torch.randn(length, KV_HEADS, dim),
    )
    blocks = torch.randperm(29)[: -(-length // size)].to(torch.int32) + 1
    slots = blocks[torch.arange(length) // size].long() * size + torch.arange(length) % size
    inputs = AttentionInputs(
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        blocks[None],
        slots,
    )
    found = []
    for chosen, dtype in ((kernels, "int8"), (reference, "int8"), (reference, "float32")):
        cache = chosen.empty_cache(1, 30, KV_HEADS, dim, size, dtype)[0]
        write(chosen, (q, k, v), torch.empty(length, 0), cache, slots, torch.arange(length))
        found.append(chosen.paged_attention(chosen.plan(inputs), q, cache, dim**-0.5))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    # a value is off by half a scale, a score by about its noise, which changes a weight by that share
    widest = v.abs().max() / 127 * (1 + 2**-7)
    noise = k.abs().max() / 254 * q.norm(dim=-1).max() * dim**-0.5 * 4 / 3**0.5
    assert (found[1] - found[2]).abs().max() <= widest / 2 + 2 * noise * v.abs().max()
    assert (found[1] - found[2]).abs().mean() <= widest / 2
