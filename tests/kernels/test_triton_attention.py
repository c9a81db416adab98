"""Triton's paged attention, in its interpreter, against the reference, with NaN in all memory no query may see."""

from __future__ import annotations

import pytest
import torch
from caches import poisoned_cache
from tensors import OnTensors

from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.reference import ReferenceKernels

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from triton.runtime.interpreter import interpreter_builder

from paged_backend.kernels.triton import launch
from paged_backend.kernels.triton.backend import SizedInputs, TritonKernels

ORACLE = OnTensors(ReferenceKernels())
Pick = tuple[int, int, int]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
# by the number of bits: what a product of rounded weights and values may be off by
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Pool:
    """Random keys and values of some sequences, scattered over a NaN-filled pool in random order.

    contexts: their lengths. kv_heads G, dim D, size: tokens of a block. The dtype is that of keys and values.
    """

    def __init__(self, contexts: list[int], kv_heads: int, dim: int, size: int, dtype: torch.dtype) -> None:
        counts = [-(-c // size) for c in contexts]
        total = sum(counts) + 1
        self.size, self.contexts = size, contexts
        self.blocks = list((torch.randperm(total - 1) + 1).split(counts))
        self.cache = poisoned_cache(total, kv_heads, dim, size, dtype)
        for blocks, context in zip(self.blocks, contexts):
            at = torch.arange(context)
            slots, no_rotation = blocks[at // size] * size + at % size, torch.empty(context, 0)
            q, k, v = torch.zeros(context, 1, dim), *torch.randn(2, context, kv_heads, dim)
            if dtype == torch.float16:
                self.cache.key[slots // size, :, :, slots % size] = k.to(dtype)
                self.cache.value[slots // size, :, slots % size] = v.to(dtype)
            else:
                ORACLE.rotary_and_cache(q, k, v, no_rotation, no_rotation, self.cache, slots)

    def inputs(self, picks: list[Pick], window: int | None) -> AttentionInputs:
        """picks: (sequence, first position, stop position). Blocks that the window has passed are the null block."""
        table = torch.zeros(len(picks), max(len(b) for b in self.blocks) + 1, dtype=torch.int32)
        for i, (s, start, _) in enumerate(picks):
            table[i, : len(self.blocks[s])] = self.blocks[s]
            if window is not None:
                table[i, : max(0, start - window + 1) // self.size] = 0
        lens = torch.tensor([stop - start for _, start, stop in picks])
        return AttentionInputs(
            torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int(),
            torch.tensor([stop for _, _, stop in picks], dtype=torch.int32),
            table,
            torch.zeros(int(lens.sum()), dtype=torch.int64),
        )

    def run(self, kernels: TritonKernels, picks: list[Pick], queries: list[torch.Tensor], **options: object):  # type: ignore[no-untyped-def]
        """queries[s]: [context, H, D] of a whole sequence -> per pick [queries, H * D], ours and the reference's."""
        window = options.get("window")
        inputs = self.inputs(picks, window if isinstance(window, int) else None)
        q = torch.cat([queries[s][start:stop] for s, start, stop in picks])
        padded = torch.full((q.shape[0], q.shape[1] + 2, q.shape[2]), float("nan"), dtype=q.dtype)
        padded[:, : q.shape[1]] = q  # a strided view, as of a qkv matrix
        scale = q.shape[2] ** -0.5
        out = kernels.paged_attention(
            kernels.plan(inputs), padded[:, : q.shape[1]], self.cache, scale, **options
        )  # type: ignore[arg-type]
        assert out.dtype == q.dtype
        counts = [stop - start for _, start, stop in picks]
        wide = self.cache if self.cache.key_scale is not None else self.cache.map(torch.Tensor.float)
        expected = ORACLE.paged_attention(ORACLE.plan(inputs), q.float(), wide, scale, **options)  # type: ignore[arg-type]
        return list(out.split(counts)), list(expected.split(counts))


def options_of(variant: str, heads: int) -> dict[str, object]:
    options: dict[str, object] = {}
    if variant in ("window", "all"):
        options["window"] = 37
    if variant in ("softcap", "all"):
        options["softcap"] = 5.0
    if variant in ("sinks", "all"):
        options["sinks"] = torch.randn(heads) * 2
    return options


def check(heads: int, kv_heads: int, dim: int, size: int, variant: str, dtype: str, kv: str) -> None:
    # first token, short chunk, decode, prefill from within, decode over many blocks, chunk over a tile's edge
    contexts = [1, 15, 64, 77, 130, 200]
    picks = [(0, 0, 1), (1, 12, 15), (2, 63, 64), (3, 50, 77), (4, 129, 130), (5, 190, 200)]
    pool = Pool(contexts, kv_heads, dim, size, DTYPES[kv])
    queries = [(torch.randn(c, heads, dim) * 2).to(DTYPES[dtype]) for c in contexts]
    out, expected = pool.run(TritonKernels("cpu", dtype), picks, queries, **options_of(variant, heads))
    for got, want in zip(out, expected):
        torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size", "variant", "dtype", "kv"),
    [
        (4, 2, 32, 16, "plain", "float32", "float32"),
        (4, 2, 32, 16, "all", "float32", "float32"),
        (3, 1, 20, 4, "window", "float32", "float32"),
        (3, 1, 80, 32, "softcap", "float32", "bfloat16"),
        (2, 2, 64, 16, "sinks", "bfloat16", "bfloat16"),
        (4, 1, 128, 16, "all", "float16", "float16"),
        (2, 1, 256, 8, "plain", "bfloat16", "bfloat16"),
        (4, 2, 32, 16, "all", "float32", "int8"),
        (3, 1, 20, 4, "window", "bfloat16", "int8"),
        (2, 1, 64, 32, "sinks", "float16", "int8"),
    ],
)
def test_attention_equals_the_reference(
    heads: int, kv_heads: int, dim: int, size: int, variant: str, dtype: str, kv: str
) -> None:
    check(heads, kv_heads, dim, size, variant, dtype, kv)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "dtype", "kv"),
    [
        ("plain", "float32", "float32"),
        ("window", "float32", "float32"),
        ("softcap", "float32", "float32"),
        ("sinks", "float32", "float32"),
        ("all", "float32", "float32"),
        ("plain", "float32", "bfloat16"),
        ("all", "float32", "bfloat16"),
        ("plain", "bfloat16", "bfloat16"),
        ("plain", "float32", "int8"),
        ("all", "bfloat16", "int8"),
        ("all", "bfloat16", "bfloat16"),
        ("plain", "float16", "float16"),
        ("all", "float16", "float16"),
    ],
)
def test_attention_equals_the_reference_on_the_grid_of_the_c_kernels(
    head_shape: tuple[int, int, int], variant: str, dtype: str, kv: str
) -> None:
    heads, kv_heads, dim = head_shape
    check(heads, kv_heads, dim, (16, 32, 4)[(heads + dim) % 3], variant, dtype, kv)


def _bits_do_not_depend_on_the_batch(
    window: int | None, kv: str, picks_of: list[list[Pick]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SEGMENT", 128)  # several segments in a short context
    contexts, heads, dim = [400, 70, 300], 2, 32
    pool = Pool(contexts, 1, dim, 16, DTYPES[kv])
    queries = [torch.randn(c, heads, dim) for c in contexts]
    options: dict[str, object] = {"window": window, "sinks": torch.randn(heads)}
    kernels = TritonKernels("cpu", "float32")
    seen: dict[tuple[bool, int, int], torch.Tensor] = {}
    again = 0
    for picks in picks_of:
        for processors in (0, 64):  # one worker for all segments, then one each
            kernels._launch.processors = processors
            out, expected = pool.run(kernels, picks, queries, **options)
            for (s, start, stop), got, want in zip(picks, out, expected):
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
                for position in range(start, stop):
                    # queries of few tokens have tiles of their own: bits are compared within each class
                    row, key = got[position - start], (stop - start <= 8, s, position)
                    again += key in seen
                    assert torch.equal(seen.setdefault(key, row), row), (picks, s, position)
    assert again >= 2


@pytest.mark.parametrize(("window", "kv"), [(None, "float32"), (150, "float32"), (150, "int8")])
def test_a_decode_is_the_same_bits_in_every_batch_and_among_any_number_of_workers(
    window: int | None, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picks_of = [[(0, 399, 400)], [(1, 69, 70), (0, 399, 400)], [(2, 298, 300), (0, 398, 400)]]
    _bits_do_not_depend_on_the_batch(window, kv, picks_of, monkeypatch)


@pytest.mark.parametrize(("window", "kv"), [(None, "float32"), (150, "float32"), (150, "int8")])
def test_a_prefill_is_the_same_bits_in_every_chunk_and_batch(
    window: int | None, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picks_of = [[(1, 0, 70)], [(1, 20, 33)], [(1, 33, 70), (2, 299, 300)]]
    _bits_do_not_depend_on_the_batch(window, kv, picks_of, monkeypatch)


@pytest.mark.parametrize("variant", ["plain", "sinks", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_that_the_host_knows_need_not_be_tight(
    variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tight, the contexts are one segment and nothing is merged; the bits are those of the merge."""
    pool = Pool([90, 9], 1, 32, 16, DTYPES[dtype])
    inputs = pool.inputs([(0, 87, 90), (1, 8, 9)], None)
    q, options = torch.randn(4, 2, 32).to(DTYPES[dtype]), options_of(variant, 2)
    kernels = TritonKernels("cpu", dtype)
    sized = SizedInputs(
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        inputs.slot_mapping,
        query_counts=(1, 4, 900),
        longest=5000,
    )
    ran: list[str] = []
    run = kernels._launch.launch

    def record(kernel, grid, *args, **options):  # type: ignore[no-untyped-def]
        ran.append(kernel.fn.__name__)
        run(kernel, grid, *args, **options)

    monkeypatch.setattr(kernels._launch, "launch", record)
    tight = kernels.paged_attention(kernels.plan(inputs), q, pool.cache, 0.2, **options)  # type: ignore[arg-type]
    assert ran == ["attention"]
    loose = kernels.paged_attention(kernels.plan(sized), q, pool.cache, 0.2, **options)  # type: ignore[arg-type]
    assert torch.equal(loose, tight)
    assert ran[1:] == ["attention", "attention_merge", "attention"]


def test_a_query_that_is_not_finite_does_not_touch_its_neighbours() -> None:
    pool = Pool([40], 1, 32, 16, torch.float32)
    kernels = TritonKernels("cpu", "float32")
    queries = [torch.randn(40, 3, 32)]
    clean = pool.run(kernels, [(0, 20, 40)], queries)[0][0].view(20, 3, 32)
    queries[0][25, 1, 7] = float("nan")
    out = pool.run(kernels, [(0, 20, 40)], queries)[0][0].view(20, 3, 32)
    assert out[5, 1].isnan().all()
    out[5, 1] = clean[5, 1]
    assert torch.equal(out, clean)


def test_scores_of_any_size_stay_finite() -> None:
    pool = Pool([100], 1, 32, 16, torch.float32)
    queries = [torch.randn(100, 2, 32) * 1000]
    for pick in ((0, 60, 100), (0, 99, 100)):
        (out,), (expected,) = pool.run(TritonKernels("cpu", "float32"), [pick], queries)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_tiles_that_see_most_run_first_and_the_key_heads_of_a_tile_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool([150], 3, 32, 16, torch.float32)
    inputs = pool.inputs([(0, 0, 150)], None)
    kernels = TritonKernels("cpu", "float32")
    run = kernels._launch.launch

    def begin(kernel, grid, *args, **options):  # type: ignore[no-untyped-def]
        """Only the first four of the programs; they are told how many there would be."""
        assert grid == (30,)  # 10 tiles of 16 queries, 3 key heads
        monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda *_: None)
        monkeypatch.setattr(interpreter_builder, "grid_dim", (*grid, 1, 1), raising=False)
        args[3].fill_(float("nan"))
        run(kernel, (4,), *args, **options)

    monkeypatch.setattr(kernels._launch, "launch", begin)
    out = kernels.paged_attention(kernels.plan(inputs), torch.randn(150, 6, 32), pool.cache, 0.2)
    written = out.view(150, 3, 64).isfinite().all(2)
    assert written[144:].all()
    assert written[128:144].any(0).sum() == 1
    assert not written[:128].any()


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_a_prompt_in_the_step_leaves_decodes_their_workers(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SEGMENT", 64)
    contexts = [300, 170, 90, 20, 200]
    # a decode, a prompt, a short and the longest short chunk, the shortest long one
    picks = [(0, 299, 300), (1, 0, 170), (2, 87, 90), (3, 12, 20), (4, 191, 200)]
    pool = Pool(contexts, 2, 32, 16, torch.float32)
    kernels = TritonKernels("cpu", "float32")
    grids: list[tuple[int, ...]] = []
    run = kernels._launch.launch

    def record(kernel, grid, *args, **options):  # type: ignore[no-untyped-def]
        grids.append(grid)
        run(kernel, grid, *args, **options)

    monkeypatch.setattr(kernels._launch, "launch", record)
    out, expected = pool.run(
        kernels, picks, [torch.randn(c, 4, 32) for c in contexts], **options_of(variant, 4)
    )
    for got, want in zip(out, expected):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    # 4 processors: 32 programs, of which 5 sequences and 2 key heads need 4 workers; 191 tokens in tiles of 16
    assert grids == [(5, 2, 4), (5 * 8, 4), ((191 // 16 + 5) * 2,)]
