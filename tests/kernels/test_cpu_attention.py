"""C paged attention against a dense fp64 formula, with NaN in all memory that no query may see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches import poisoned_cache
from tensors import OnTensors

from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.kv_cache import quantize
from paged_backend.kernels.tensor import as_tensor


class Case:
    """Random K and V of some sequences, scattered over a NaN-filled pool; blocks a window has passed are block 0."""

    def __init__(
        self,
        contexts: list[int],
        kv_heads: int,
        dim: int,
        size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.contexts, self.kv_heads, self.dim, self.size = contexts, kv_heads, dim, size
        counts = [-(-c // size) for c in contexts]
        total = sum(counts) + 1
        ids = torch.randperm(total - 1) + 1
        self.blocks = list(ids.split(counts))
        self.k = [torch.randn(c, kv_heads, dim) for c in contexts]
        self.v = [torch.randn(c, kv_heads, dim) for c in contexts]
        self.cache = poisoned_cache(total, kv_heads, dim, size, dtype)
        for blocks, k, v in zip(self.blocks, self.k, self.v):
            for j in range(len(k)):
                block, offset = blocks[j // size], j % size
                self.cache.key[block, :, :, offset], k[j] = self.kept(k[j], "key_scale", block, offset)
                self.cache.value[block, :, offset], v[j] = self.kept(v[j], "value_scale", block, offset)

    def kept(
        self, x: torch.Tensor, scales: str, block: torch.Tensor, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds for x [G, D], and what that stands for; writes the scale, where there is one."""
        if self.cache.key_scale is None:
            codes = x.to(self.cache.key.dtype)
            return codes, codes.float()
        codes, scale = map(as_tensor, quantize(x.numpy()))
        getattr(self.cache, scales)[block, :, offset] = scale
        return codes, codes * scale.float()[:, None]

    def run(
        self,
        kernels: OnTensors,
        picks: list[tuple[int, int, int]],
        queries: list[torch.Tensor],
        **options: object,
    ) -> list[torch.Tensor]:
        """picks: (sequence, first position, stop position); queries[s]: [context, H, D] of the whole sequence."""
        window = options.get("window")
        width = max(len(b) for b in self.blocks) + 1
        table = torch.zeros(len(picks), width, dtype=torch.int32)
        for i, (s, start, _) in enumerate(picks):
            table[i, : len(self.blocks[s])] = self.blocks[s]
            if isinstance(window, int):
                table[i, : max(0, start - window + 1) // self.size] = 0
        lens = torch.tensor([stop - start for _, start, stop in picks])
        inputs = AttentionInputs(
            torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int(),
            torch.tensor([stop for _, _, stop in picks], dtype=torch.int32),
            table,
            torch.zeros(int(lens.sum()), dtype=torch.int64),
        )
        q = torch.cat([queries[s][start:stop] for s, start, stop in picks])
        padded = torch.full(
            (q.shape[0], q.shape[1] + 2, self.dim), float("nan")
        )  # a strided view, as of a qkv matrix
        padded[:, : q.shape[1]] = q
        out = kernels.paged_attention(
            kernels.plan(inputs),
            padded[:, : q.shape[1]],
            self.cache,
            self.dim**-0.5,
            **options,  # type: ignore[arg-type]
        )
        return list(out.split(lens.tolist()))

    def dense(
        self, s: int, start: int, stop: int, q: torch.Tensor, window: int | None = None, softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        heads = q.shape[1]
        k = self.k[s][:stop].double().repeat_interleave(heads // self.kv_heads, 1)
        v = self.v[s][:stop].double().repeat_interleave(heads // self.kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].double(), k) * self.dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(heads, stop - start, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(stop - start, -1)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("plain", torch.float32),
        ("window", torch.float32),
        ("softcap", torch.float32),
        ("sinks", torch.float32),
        ("all", torch.float32),
        ("plain", torch.bfloat16),
        ("all", torch.bfloat16),
        ("plain", torch.int8),
        ("all", torch.int8),
    ],
)
def test_attention_equals_dense(
    kernels: OnTensors, head_shape: tuple[int, int, int], variant: str, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = head_shape
    size = (16, 32, 4)[(heads + dim) % 3]
    case = Case([1, 15, 64, 77, 130, 200], kv_heads, dim, size, dtype)
    queries = [torch.randn(c, heads, dim) * 3 for c in case.contexts]
    options: dict[str, object] = {}
    if variant in ("window", "all"):
        options["window"] = 37
    if variant in ("softcap", "all"):
        options["softcap"] = 5.0
    if variant in ("sinks", "all"):
        options["sinks"] = torch.randn(heads) * 2
    picks = [(0, 0, 1), (1, 10, 15), (2, 63, 64), (3, 30, 77), (4, 129, 130), (5, 180, 200)]
    for pick, out in zip(picks, case.run(kernels, picks, queries, **options)):
        expected = case.dense(*pick, queries[pick[0]], **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dim", "size", "window", "dtype"),
    [
        (64, 16, None, torch.float32),
        (80, 32, 100, torch.float32),
        (40, 8, 600, torch.float32),
        (64, 16, 100, torch.bfloat16),
        (80, 32, None, torch.bfloat16),
        (40, 8, None, torch.bfloat16),
        (64, 16, 100, torch.int8),
        (80, 32, None, torch.int8),
        (40, 8, None, torch.int8),
    ],
)
def test_a_query_is_the_same_bits_in_every_chunk_batch_and_thread_count(
    kernels: OnTensors,
    threads: Callable[[int], None],
    dim: int,
    size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    case = Case([1300, 90, 700], 2, dim, size, dtype)
    queries = [torch.randn(c, 6, dim) for c in case.contexts]
    options: dict[str, object] = {"window": window, "sinks": torch.randn(6)}
    whole = case.run(kernels, [(0, 900, 1300), (1, 0, 90), (2, 0, 700)], queries, **options)
    torch.testing.assert_close(
        whole[0].double(),
        case.dense(0, 900, 1300, queries[0], **options),
        rtol=1e-5,
        atol=2e-5,  # type: ignore[arg-type]
    )
    expected = [torch.cat([torch.zeros(900, 6 * dim), whole[0]]), whole[1], whole[2]]
    picks_of = [
        [(0, 1299, 1300)],
        [(0, 1001, 1018), (1, 89, 90), (2, 511, 530)],
        [(0, 1033, 1040)],
        [(2, 600, 700), (0, 900, 901)],
        [(2, 512, 513)],
        [(2, 511, 512)],
        [(1, 5, 77)],
    ]
    for count in (1, 3):
        threads(count)
        for picks in picks_of:
            for (s, start, stop), out in zip(picks, case.run(kernels, picks, queries, **options)):
                assert torch.equal(out, expected[s][start:stop]), (count, s, start, stop)


def test_a_query_that_is_not_finite_does_not_touch_its_neighbours(kernels: OnTensors) -> None:
    case = Case([40], 1, 64)
    queries = [torch.randn(40, 3, 64)]
    clean = case.run(kernels, [(0, 20, 40)], queries)[0].view(20, 3, 64)
    queries[0][25, 1, 7] = float("nan")
    out = case.run(kernels, [(0, 20, 40)], queries)[0].view(20, 3, 64)
    assert out[5, 1].isnan().all()
    out[5, 1] = clean[5, 1]
    assert torch.equal(out, clean)


def test_other_cache_dtypes_are_refused(kernels: OnTensors) -> None:
    case = Case([4], 1, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="float16"):
        case.run(kernels, [(0, 0, 4)], [torch.randn(4, 1, 64)])


@pytest.mark.parametrize("size", [100, 1000, 100_000])
def test_scores_of_any_size_stay_finite(kernels: OnTensors, size: int) -> None:
    case = Case([300], 1, 64)
    q = torch.randn(300, 2, 64) * size
    out = case.run(kernels, [(0, 250, 300)], [q])[0].double()
    # a score of 64 products is off by a few roundings of their sizes, its weight by that factor
    k, v = case.k[0].double(), case.v[0].double()
    roundings = torch.einsum("qhd,kgd->qhk", q[250:].double().abs(), k.abs()).amax(2) * 64**-0.5 * 2.0**-21
    bound = (roundings * 2 * v.abs().max()).repeat_interleave(64, 1).reshape(50, -1) + 1e-5
    assert ((out - case.dense(0, 250, 300, q)).abs() <= bound).all()
    assert v.min() - 1e-5 <= out.min()
    assert out.max() <= v.max() + 1e-5
