"""The reference kernels against definitions written out token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from packing import pack
from tensors import OnTensors

from paged_backend.kernels.base import AttentionInputs, PackedLinear
from paged_backend.kernels.kv_cache import LayerCache
from paged_backend.kernels.reference import ReferenceKernels


@pytest.fixture
def kernels():
    return OnTensors(ReferenceKernels())


def poisoned_cache(num_blocks, groups, dim, block_size):
    key = torch.full((num_blocks, groups, dim, block_size), float("nan"))
    return LayerCache(key, torch.full((num_blocks, groups, block_size, dim), float("nan")))


def scattered(lens, queries, groups, dim, block_size, spare=3):
    """A NaN pool that holds random keys and values of sequences with the given context lengths.

    Returns the cache, the inputs and the dense (keys, values) [len, G, D] of each sequence.
    """
    counts = [math.ceil(n / block_size) for n in lens]
    order = (torch.randperm(sum(counts) + spare) + 1).tolist()
    cache = poisoned_cache(len(order) + 1, groups, dim, block_size)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    dense = []
    for row, (length, count) in enumerate(zip(lens, counts)):
        ids = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(ids)
        keys, values = torch.randn(length, groups, dim), torch.randn(length, groups, dim)
        for p in range(length):
            cache.key[ids[p // block_size], :, :, p % block_size] = keys[p]
            cache.value[ids[p // block_size], :, p % block_size] = values[p]
        dense.append((keys, values))
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(queries), dtype=torch.int64)
    inputs = AttentionInputs(start, torch.tensor(lens, dtype=torch.int32), table, slots)
    return cache, inputs, dense


def naive_attention(q, dense, queries, scale, window, softcap, sinks):
    rows, out = iter(q.double()), []
    for (keys, values), count in zip(dense, queries):
        length, groups, _ = keys.shape
        for p in range(length - count, length):
            row = next(rows)
            for head in range(row.shape[0]):
                group = head // (row.shape[0] // groups)
                first = 0 if window is None else max(0, p - window + 1)
                scores = keys[first : p + 1, group].double() @ row[head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out.append(weights @ values[first : p + 1, group].double() / total)
    return torch.stack(out).view(q.shape[0], -1).float()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 1000])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True), (1.5, True)])
def test_attention_equals_its_definition(kernels, block_size, heads, window, softcap, with_sinks):
    # vLLM PR #936, PR #43990, Wan2GP PR #1628: unwritten memory must not leak, not even times zero
    num_heads, groups = heads
    lens, queries = [37, 1, 20, 16, 33], [37, 1, 1, 3, 16]  # prefill, first token, decode, verify, chunk
    cache, inputs, dense = scattered(lens, queries, groups, 8, block_size)
    sinks = torch.randn(num_heads) if with_sinks else None
    q = torch.randn(sum(queries), num_heads, 8)
    ours = kernels.paged_attention(kernels.plan(inputs), q, cache, 0.3, window, softcap, sinks)
    torch.testing.assert_close(
        ours, naive_attention(q, dense, queries, 0.3, window, softcap, sinks), rtol=1e-4, atol=1e-5
    )


def test_long_prefills_are_scored_in_tiles_with_the_same_result(kernels):
    cache, inputs, dense = scattered([300], [290], 2, 4, 16)
    q = torch.randn(290, 4, 4)
    for window in (None, 40):
        ours = kernels.paged_attention(kernels.plan(inputs), q, cache, 0.5, window)
        torch.testing.assert_close(
            ours, naive_attention(q, dense, [290], 0.5, window, None, None), rtol=1e-4, atol=1e-5
        )


def test_blocks_that_the_window_has_passed_are_never_read(kernels):
    # mlxcel #678, FlashInfer #4972: their table entries are the null block, which here holds NaN
    cache, inputs, dense = scattered([40], [2], 1, 4, 4)
    window = 9
    inputs.block_table[0, : (38 - window + 1) // 4] = 0
    q = torch.randn(2, 2, 4)
    ours = kernels.paged_attention(kernels.plan(inputs), q, cache, 1.0, window)
    torch.testing.assert_close(
        ours, naive_attention(q, dense, [2], 1.0, window, None, None), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rotated", [2, 6, 8])
def test_rotary_turns_pairs_in_place_and_writes_the_slots(kernels, rotated):
    tokens, heads, groups, dim, size = 7, 4, 2, 8, 4
    qkv = torch.randn(tokens, heads + 2 * groups, dim)
    before = qkv.clone()
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + groups], qkv[:, heads + groups :]
    angle = torch.randn(tokens, rotated // 2)
    slots = torch.randperm(5 * size)[:tokens]
    cache = poisoned_cache(5, groups, dim, size)
    kernels.rotary_and_cache(q, k, v, angle.cos(), angle.sin(), cache, slots)

    half = rotated // 2
    turned = torch.view_as_complex(torch.stack([before[..., :half], before[..., half:rotated]], -1))
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat([turned.real, turned.imag, before[..., rotated:]], -1)
    expected[:, heads + groups :] = before[:, heads + groups :]
    torch.testing.assert_close(qkv, expected)
    for t, slot in enumerate(slots.tolist()):
        assert torch.equal(cache.key[slot // size, :, :, slot % size], k[t])
        assert torch.equal(cache.value[slot // size, :, slot % size], v[t])
    assert int(cache.key.isnan().sum()) == (5 * size - tokens) * groups * dim
    assert int(cache.value.isnan().sum()) == (5 * size - tokens) * groups * dim


def test_attention_takes_strided_queries(kernels):
    cache, inputs, _ = scattered([9, 5], [2, 5], 2, 8, 4)
    qkv = torch.randn(7, 8, 8)
    plan = kernels.plan(inputs)
    strided = kernels.paged_attention(plan, qkv[:, :4], cache, 0.5)
    assert torch.equal(strided, kernels.paged_attention(plan, qkv[:, :4].contiguous(), cache, 0.5))


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_of_packed_parts_equals_separate_linears(kernels, dtype, with_bias):
    parts = [torch.randn(n, 12).bfloat16() for n in (8, 4, 4)]
    biases = [torch.randn(8), None, torch.randn(4)] if with_bias else None
    packed = pack(kernels, parts, biases, dtype)
    assert (packed.in_features, packed.out_features) == (12, 16)
    x = torch.randn(5, 12)
    separate = [F.linear(x, w.float(), b) for w, b in zip(parts, biases or [None] * 3)]
    torch.testing.assert_close(kernels.linear(x, packed), torch.cat(separate, -1))
    size = 2 if dtype == "bfloat16" else 4
    assert packed.nbytes() == 16 * 12 * size + (16 * 4 if with_bias else 0)


def test_embedding_reads_rows_of_a_packed_table(kernels):
    table = torch.randn(10, 6)
    ids = torch.tensor([3, 3, 9, 0])
    assert torch.equal(kernels.embedding(ids, pack(kernels, [table])), table[ids])
    half = kernels.embedding(ids, pack(kernels, [table], dtype="bfloat16"))
    assert half.dtype == torch.float32
    assert torch.equal(half, table[ids].bfloat16().float())


def test_packing_copies_so_that_the_source_may_go(kernels):
    source = torch.randn(4, 6)
    packed = pack(kernels, [source])
    x = torch.randn(2, 6)
    before = kernels.linear(x, packed)
    source.fill_(float("nan"))
    assert torch.equal(kernels.linear(x, packed), before)


def test_dtypes_that_need_other_kernels_and_unknown_ones_are_refused(kernels):
    for dtype in ("int8", "int4"):
        with pytest.raises(ValueError, match="int8 and int4 weights need the C kernels"):
            pack(kernels, [torch.zeros(2, 2)], dtype=dtype)
    with pytest.raises(ValueError, match="got 'float8'"):
        pack(kernels, [torch.zeros(2, 2)], dtype="float8")
    with pytest.raises(ValueError, match="share K"):
        pack(kernels, [torch.zeros(2, 2), torch.zeros(2, 3)])


def test_weights_of_another_backend_are_refused(kernels):
    class Other(PackedLinear):
        in_features = out_features = 2

        def nbytes(self):
            return 0

    with pytest.raises(TypeError, match="Other"):
        kernels.linear(torch.zeros(1, 2), Other())


def test_rms_norm_alone_and_with_the_residual(kernels):
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    heads = torch.randn(3, 4, 16)
    torch.testing.assert_close(kernels.rms_norm(heads, weight, 1e-5), F.rms_norm(heads, (16,), weight, 1e-5))
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (16,), weight, 1e-6))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_act_and_mul(kernels, name, function):
    x = torch.randn(5, 12)
    torch.testing.assert_close(kernels.act_and_mul(x, name), function(x[:, :6]) * x[:, 6:])


def test_an_unknown_activation_is_named(kernels):
    with pytest.raises(ValueError, match="relu"):
        kernels.act_and_mul(torch.randn(1, 4), "relu")


def test_copy_blocks_copies_every_layer_and_nothing_else(kernels):
    caches = kernels.empty_cache(2, 6, 2, 4, 4)
    for cache in caches:
        cache.key.normal_()
        cache.value.normal_()
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
    kernels.copy_blocks(caches, [(1, 4), (2, 5)])
    kernels.copy_blocks(caches, [])
    origin = torch.tensor([0, 1, 2, 3, 1, 2])
    for cache, (key, value) in zip(caches, before):
        assert torch.equal(cache.key, key[origin])
        assert torch.equal(cache.value, value[origin])


def test_a_bf16_cache_holds_rounded_keys_and_values_and_is_read_as_float(kernels):
    cache, inputs, dense = scattered([20], [3], 2, 8, 4)
    half = LayerCache(cache.key.bfloat16(), cache.value.bfloat16())
    q = torch.randn(3, 4, 8)
    ours = kernels.paged_attention(kernels.plan(inputs), q, half, 0.5)
    rounded = [(k.bfloat16().float(), v.bfloat16().float()) for k, v in dense]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, naive_attention(q, rounded, [3], 0.5, None, None, None), rtol=1e-4, atol=1e-5
    )
    k, v, slots = torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randperm(12)[:5]
    kernels.rotary_and_cache(torch.randn(5, 4, 8), k, v, torch.ones(5, 4), torch.zeros(5, 4), half, slots)
    assert torch.equal(half.key[slots // 4, :, :, slots % 4], k.bfloat16())
    assert torch.equal(half.value[slots // 4, :, slots % 4], v.bfloat16())


def test_empty_cache_has_the_layout_of_the_contract(kernels):
    caches = kernels.empty_cache(3, 7, 2, 8, 16)
    assert len(caches) == 3
    assert {t.dtype for t in (caches[0].key, caches[0].value)} == {torch.float32}
    assert kernels.empty_cache(1, 2, 2, 8, 16, "bfloat16")[0].value.dtype == torch.bfloat16
    assert caches[0].key.shape == (7, 2, 8, 16)
    assert caches[0].value.shape == (7, 2, 16, 8)
    assert caches[0].block_size == 16
