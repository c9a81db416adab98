"""The device runner with interpreted kernels: the same steps as on a GPU, against the host's runner."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from packing import pack
from tensors import OnTensors

from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.triton.backend import TritonKernels
from paged_backend.runner import device_memory
from paged_backend.runner.base import ScheduledSequence, drawn_by
from paged_backend.runner.decode_graphs import DecodeGraphs, graph_context, graph_rows, padded
from paged_backend.runner.device_memory import GrowingCache
from paged_backend.runner.device_runner import DeviceRunner
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.model_runner import ModelRunner
from paged_backend.runner.sampler import SampleRow
from paged_backend.runner.staging import Staging, room_for
from paged_backend.sampling_params import SamplingParams

CPU = torch.device("cpu")
SPEC: Any = SimpleNamespace(vocab_size=40, num_layers=1, num_kv_heads=1, head_dim=8)


class Echo:
    """A model that reads its context back through the cache: logits are a function of what attention sees."""

    spec = SPEC

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.forwards = kernels, 0
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(40, 8, generator=generator)
        self.head = pack(kernels, [torch.randn(40, 16, generator=generator) * 3])

    def forward(
        self, input_ids: Any, positions: Any, attention: Any, logit_rows: Any, caches: Any
    ) -> torch.Tensor:
        self.forwards += 1
        plan = self.kernels.plan(attention)
        x = self.table[input_ids][:, None]
        angles = positions[:, None].float() * torch.tensor([1.0, 0.1, 0.01, 0.001])
        q, k, v = x.repeat(1, 2, 1), x.clone(), x.clone()
        self.kernels.rotary_and_cache(q, k, v, angles.cos(), angles.sin(), caches[0], attention.slot_mapping)
        hidden = self.kernels.paged_attention(plan, q, caches[0], 0.4)[logit_rows]
        return self.kernels.linear(hidden, self.head)


class Eager:
    """A "capture" on the CPU: what replays is the function itself, into the results of its first run."""

    resets = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        outputs = run()
        return outputs, lambda: [old.copy_(new) for old, new in zip(outputs, run())]

    def reset(self) -> None:
        self.resets += 1


def row(position: int = 0, **options: Any) -> SampleRow:
    return SampleRow(
        SamplingParams(**options).resolved({}), TokenHistory([7] * position, 0), position, seed=3
    )


def prompt(ids: list[int], blocks: list[int], rows: list[SampleRow], **options: Any) -> ScheduledSequence:
    last = [*options.pop("scored", []), len(ids) - 1]
    return ScheduledSequence(ids, 0, np.array(blocks, np.int32), last, rows, **options)


def decode(token: int, start: int, blocks: list[int], one: SampleRow) -> ScheduledSequence:
    return ScheduledSequence([token], start, np.array(blocks, np.int32), [0], [one])


def device_runner(capture: Any = None, num_blocks: int = 20, held: int | None = None) -> DeviceRunner:
    kernels = TritonKernels("cpu", "float32")
    runner = DeviceRunner(Echo(kernels), kernels, num_blocks, 4, "float32", 16, 64, capture)
    if held is not None:
        runner.memory = GrowingCache(kernels, SPEC, num_blocks, 4, "float32")
        runner.memory.held = held
        runner.memory.caches = kernels.empty_cache(1, held, 1, 8, 4)
    return runner


def fill_the_device(monkeypatch: pytest.MonkeyPatch, tensor: int) -> None:
    """Let the growth of a pool fail once, at its ``tensor``-th tensor."""
    grown, calls = device_memory._grown, []

    def failing(old: torch.Tensor, blocks: int) -> torch.Tensor:
        calls.append(blocks)
        if len(calls) == tensor:
            raise torch.OutOfMemoryError("full")
        return grown(old, blocks)

    monkeypatch.setattr(device_memory, "_grown", failing)


def steps() -> list[list[ScheduledSequence]]:
    """Prompts, a mixed step, decodes; rows that the device draws and rows that the host must."""
    penalised = row(repetition_penalty=1.5, temperature=0.0)
    first = [
        prompt([1, 2, 3, 4, 5, 6], [3, 9], [row(temperature=0.0), row(1, temperature=1.0, top_p=0.8)]),
        prompt([9, 8, 7], [5], [row(temperature=1.0, top_k=5)], scored=[0, 1], scored_ids=[8, 7], num_top=2),
        prompt([4, 4, 4, 4], [7], [penalised]),
    ]
    second = [
        decode(11, 6, [3, 9], row(1, temperature=0.7, min_p=0.1)),
        prompt([30, 31, 32], [11], [row(temperature=0.0, logprobs=2)]),
        decode(12, 3, [5], row(1, temperature=0.0)),
    ]
    third = [decode(13, 7, [3, 9], row(2, temperature=1.0)), decode(14, 4, [5, 2], row(2, temperature=0.0))]
    fourth = [
        decode(15, 8, [3, 9, 18], row(3, temperature=1.0)),
        decode(16, 5, [5, 2], row(3, temperature=0.0)),
    ]
    return [first, second, third, fourth, [decode(1, 3, [11], row(1, temperature=0.0))]]


def host_results() -> list[Any]:
    kernels = OnTensors(ReferenceKernels())
    runner = ModelRunner(Echo(kernels), kernels, 20, 4)
    return [runner.run(works) for works in steps()]


@pytest.mark.parametrize("capture", [None, Eager()])
def test_the_device_runner_gives_what_the_host_runner_gives(capture: Any) -> None:
    runner = device_runner(capture)
    for works, expected in zip(steps(), host_results()):
        for got, want in zip(runner.run(works), expected, strict=True):
            assert [s.token_id for s in got.sampled] == [s.token_id for s in want.sampled]
            for mine, theirs in zip(
                [*got.sampled, *got.prompt_logprobs], [*want.sampled, *want.prompt_logprobs]
            ):
                assert mine.rank == theirs.rank
                assert (mine.logprob is None) == (theirs.logprob is None)
                if mine.logprob is not None:
                    assert mine.logprob == pytest.approx(theirs.logprob, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("capture", [None, Eager()])
def test_a_step_may_name_tokens_that_the_step_before_it_draws(capture: Any) -> None:
    greedy, drawn = row(temperature=0.0), row(1, temperature=1.0)

    def first() -> list[ScheduledSequence]:
        return [prompt([1, 2, 3, 4, 5, 6], [3, 9], [drawn]), prompt([9, 8, 7], [5], [greedy])]

    def second(a: int, b: int) -> list[ScheduledSequence]:
        return [decode(b, 3, [5], row(1, temperature=0.0)), decode(a, 6, [3, 9], row(2, temperature=1.0))]

    def third(a: int) -> list[ScheduledSequence]:  # beside a prompt, so that it is no graph
        return [decode(a, 7, [3, 9], row(3, temperature=0.0)), prompt([1, 2], [7], [row(temperature=0.0)])]

    runner = device_runner(capture)
    one = [result.sampled[0].token_id for result in runner.run(first())]
    two = [result.sampled[0].token_id for result in runner.run(second(*one))]
    three = [result.sampled[0].token_id for result in runner.run(third(two[1]))]

    runner = device_runner(capture)
    waits = [
        runner.launch(first()),
        runner.launch(second(drawn_by(0), drawn_by(1))),
        runner.launch(third(drawn_by(1))),
    ]
    found = [[result.sampled[0].token_id for result in wait()] for wait in waits]
    assert found == [one, two, three]


def test_warming_up_runs_a_prompt_and_a_graph_and_leaves_nothing_behind() -> None:
    runner = device_runner(Eager())
    runner.warm_up(9)
    assert runner.model.forwards == 3  # type: ignore[attr-defined] # a prompt, a capture, its replay
    results = [runner.run(works) for works in steps()]
    for mine, theirs in zip(results, host_results()):
        assert [[s.token_id for s in r.sampled] for r in mine] == [
            [s.token_id for s in r.sampled] for r in theirs
        ]


@pytest.mark.parametrize("capture", [None, Eager()])
def test_penalties_see_what_the_step_before_has_just_drawn(capture: Any) -> None:
    options = {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 1.5}

    def penalised(prompt_ids: list[int], output: list[int]) -> SampleRow:
        history = TokenHistory(prompt_ids + output, len(prompt_ids))
        return SampleRow(SamplingParams(**options).resolved({}), history, len(output), seed=0)

    def drawn(runner: Any, known: bool) -> list[list[int]]:
        """Three steps of two requests: tokens named as they are, or as what the step before will have drawn."""
        a, b = [1, 2, 3, 4, 5, 6], [9, 8, 7]
        waits = [
            runner.launch([prompt(a, [3, 9], [penalised(a, [])]), prompt(b, [5], [row(temperature=0.0)])])
        ]
        outputs: list[list[int]] = [[], []]
        for step in range(2):
            if known:
                for output, result in zip(outputs, waits[-1]()):
                    output.append(result.sampled[0].token_id)
            else:
                outputs = [[*outputs[0], drawn_by(0)], [*outputs[1], drawn_by(1)]]
            waits.append(
                runner.launch(
                    [
                        decode(outputs[0][-1], 6 + step, [3, 9], penalised(a, list(outputs[0]))),
                        decode(outputs[1][-1], 3 + step, [5, 2], row(step + 1, temperature=0.0)),
                    ]
                )
            )
        return [[result.sampled[0].token_id for result in wait()] for wait in waits]

    kernels = OnTensors(ReferenceKernels())
    expected = drawn(ModelRunner(Echo(kernels), kernels, 20, 4), True)
    assert drawn(device_runner(capture), False) == expected
    assert drawn(device_runner(capture), True) == expected


def test_a_copied_block_brings_the_tokens_that_penalties_look_for() -> None:
    def repeated(runner: Any) -> list[int]:
        runner.run([prompt([1, 2, 3], [2], [row(temperature=0.0)])])
        runner.copy_blocks([(2, 15)])
        params = SamplingParams(temperature=0.0, repetition_penalty=3.0).resolved({})
        again = decode(4, 3, [15], SampleRow(params, TokenHistory([1, 2, 3, 4], 3), 1, seed=0))
        return [result.sampled[0].token_id for result in runner.run([again])]

    kernels = OnTensors(ReferenceKernels())
    assert repeated(device_runner()) == repeated(ModelRunner(Echo(kernels), kernels, 20, 4))


def test_graphs_are_captured_once_per_size_and_again_when_the_pool_has_moved() -> None:
    runner = device_runner(Eager(), held=10)
    expected = host_results()
    for i in (0, 1, 2):
        runner.run(steps()[i])
    before = runner.model.forwards  # type: ignore[attr-defined]
    tokens = [[s.token_id for s in r.sampled] for r in runner.run(steps()[2])]
    assert runner.model.forwards == before + 1  # type: ignore[attr-defined] # replayed, not captured again
    assert tokens == [[s.token_id for s in r.sampled] for r in expected[2]]
    moved = runner.run(steps()[3])  # block 18 is beyond what the pool held
    assert runner.memory.held == 20
    assert [[s.token_id for s in r.sampled] for r in moved] == [
        [s.token_id for s in r.sampled] for r in expected[3]
    ]


def test_rows_that_the_host_draws_do_not_keep_a_decode_step_from_being_a_graph() -> None:
    def works() -> list[ScheduledSequence]:
        penalised = row(1, repetition_penalty=1.5, temperature=0.0)
        return [
            decode(11, 6, [3, 9], row(1, temperature=0.7)),
            decode(12, 3, [5], penalised),
            decode(4, 4, [7, 8], row(1, temperature=0.0, logprobs=2)),
        ]

    runner, plain = device_runner(Eager()), device_runner()
    for one in (runner, plain):
        one.run(steps()[0])
    expected = plain.run(works())
    before = runner.model.forwards  # type: ignore[attr-defined]
    for run in range(2):
        assert runner.run(works()) == expected
        assert runner.model.forwards == before + 2 + run  # type: ignore[attr-defined] # captured once, then replayed


def test_graphs_are_forgotten_before_the_pool_moves_even_if_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = device_runner(Eager(), held=12)
    for i in (0, 1, 2):
        runner.run(steps()[i])
    fill_the_device(monkeypatch, 2)
    with pytest.raises(torch.OutOfMemoryError):
        runner.run(steps()[3])
    before = runner.model.forwards  # type: ignore[attr-defined]
    again = runner.run(steps()[2])  # its graph would read the tensor that has moved
    assert runner.model.forwards == before + 2  # type: ignore[attr-defined]
    expected = host_results()[2]
    assert [r.sampled[0].token_id for r in again] == [r.sampled[0].token_id for r in expected]


def test_what_cannot_be_captured_runs_all_the_same() -> None:
    class Refusing(Eager):
        tries = 0

        def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
            self.tries += 1
            raise RuntimeError("out of memory")

    refusing = Refusing()
    runner = device_runner(refusing)
    for works, expected in zip(steps(), host_results()):
        tokens = [[s.token_id for s in result.sampled] for result in runner.run(works)]
        assert tokens == [[s.token_id for s in result.sampled] for result in expected]
    assert refusing.tries == 2  # of two sizes, once each


def test_closing_frees_the_pool_at_once() -> None:
    runner = device_runner(Eager())
    runner.run(steps()[0])
    runner.run([decode(1, 3, [5], row(1, temperature=0.0))])
    pool = weakref.ref(runner.memory.caches[0].key)
    gc.disable()
    try:
        runner.close()
        del runner
        assert pool() is None
    finally:
        gc.enable()


def test_a_row_that_is_not_finite_fails_alone() -> None:
    for capture in (None, Eager()):
        runner = device_runner(capture)
        runner.run(steps()[0])
        runner.model.table[20] = float("nan")  # type: ignore[attr-defined]
        bad, good = runner.run(
            [decode(20, 6, [3, 9], row(temperature=0.0)), decode(12, 3, [5], row(1, temperature=0.0))]
        )
        assert "not finite" in str(bad.sampled[0])
        assert good.sampled[0].token_id == host_results()[1][2].sampled[0].token_id


def test_copies_grow_the_pool_too() -> None:
    runner = device_runner(held=4)
    runner.run([prompt([1, 2, 3], [2], [row(temperature=0.0)])])
    runner.copy_blocks([(2, 15)])
    assert torch.equal(runner.memory.caches[0].value[15, 0, :3], runner.memory.caches[0].value[2, 0, :3])
    runner.give_back([1])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_growing_cache_keeps_what_it_holds_and_knows_its_limit(dtype: str) -> None:
    cache = GrowingCache(TritonKernels("cpu", "float32"), SPEC, 1000, 4, dtype)
    assert cache.held == 256
    for layer in cache.caches:
        for part in layer.parts:
            part.copy_(torch.randint(-128, 128, part.shape))
    before = [layer.map(torch.clone) for layer in cache.caches]
    assert not cache.ensure(256)
    assert cache.ensure(257)
    assert cache.held == 512
    assert cache.ensure(900)
    assert cache.held == 1000
    for layer, old in zip(cache.caches, before):
        for now, then in zip(layer.parts, old.parts, strict=True):
            assert len(now) == 1000
            assert torch.equal(now[:256], then)
    with pytest.raises(ValueError, match="1000"):
        cache.ensure(1001)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_growth_that_fails_half_way_can_be_tried_again(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    spec = SimpleNamespace(vocab_size=1, num_layers=3, num_kv_heads=1, head_dim=8)
    cache = GrowingCache(TritonKernels("cpu", "float32"), spec, 600, 4, dtype)  # type: ignore[arg-type]
    fill_the_device(monkeypatch, 4)
    with pytest.raises(torch.OutOfMemoryError):
        cache.ensure(300)
    assert cache.held == 256
    assert cache.ensure(300)
    assert {len(part) for layer in cache.caches for part in layer.parts} == {512}


def test_staged_arrays_arrive_as_they_were_and_keep_their_place_in_a_given_room() -> None:
    staging = Staging(CPU)
    arrays = {
        "a": np.arange(3, dtype=np.int64),
        "b": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
        "c": np.array([], np.float32),
        "d": np.array([0.5], np.float64),
    }
    for _ in range(3):
        tensors = staging.send(arrays)
        for name, array in arrays.items():
            assert torch.equal(tensors[name], torch.from_numpy(array.copy()))
            assert tensors[name].data_ptr() % 16 == 0 or not array.size
    room = torch.zeros(room_for(arrays), dtype=torch.uint8)
    kept = staging.send(arrays, room)
    arrays["a"] = arrays["a"] + 5
    staging.send(arrays, room)
    assert kept["a"].tolist() == [5, 6, 7]


def test_graph_sizes_cover_what_they_are_for() -> None:
    assert [graph_rows(n, 256) for n in (1, 2, 3, 8, 9, 64, 65, 256)] == [1, 2, 4, 8, 16, 64, 96, 256]
    assert graph_rows(5, 6) == 6
    assert [graph_context(n, 5000) for n in (1, 512, 513, 2049, 5001)] == [512, 512, 2048, 5000, 5001]
    for rows in range(1, 300):
        assert rows <= graph_rows(rows, 256)


def test_padding_adds_rows_that_touch_the_null_block_only() -> None:
    arrays = {
        "query_start_loc": np.array([0, 1], np.int32),
        "seq_lens": np.array([9], np.int32),
        "block_table": np.array([[4, 5, 6]], np.int32),
        "slot_mapping": np.array([77], np.int64),
        "noise": np.array([0.5]),
    }
    filled = padded(arrays, 2, 4)
    assert filled["query_start_loc"].tolist() == [0, 1, 2]
    assert filled["seq_lens"].tolist() == [9, 1]
    assert filled["block_table"].tolist() == [[4, 5, 6, 0], [0, 0, 0, 0]]
    assert filled["slot_mapping"].tolist() == [77, 0]
    assert {name: array.dtype for name, array in filled.items()} == {n: a.dtype for n, a in arrays.items()}


def test_a_graph_reads_what_was_sent_last() -> None:
    seen: list[list[int]] = []

    def forward(tensors: dict[str, torch.Tensor], longest: int) -> tuple[torch.Tensor, ...]:
        seen.append(tensors["seq_lens"].tolist())
        return (tensors["seq_lens"] * 2,)

    graphs = DecodeGraphs({"only": forward}, Staging(CPU), lambda tensors: None, Eager(), 8, 2048, 16)
    arrays = {
        "query_start_loc": np.arange(4, dtype=np.int32),
        "seq_lens": np.array([3, 4, 5], np.int32),
        "block_table": np.ones((3, 1), np.int32),
    }
    graphs.run("only", arrays, 5)
    arrays["seq_lens"] = np.array([6, 7, 8], np.int32)
    graphs.run("only", arrays, 8)
    assert seen[-1] == [6, 7, 8, 1]


def test_the_pool_leaves_what_a_step_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_backend.runner.device_memory import free_device_memory, step_memory

    free = [80 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 << 30))
    assert 0.899 < free_device_memory("cuda", 1 << 30) / free[0] < 0.901
    free[0] = 10 << 30  # a large model on the same card
    assert free_device_memory("cuda", 3 << 30) == (10 - 3 - 1) << 30
    with pytest.raises(RuntimeError, match="max_num_batched_tokens"):
        free_device_memory("cuda", 9 << 30)

    spec: Any = SimpleNamespace(
        intermediate_size=14336,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    assert step_memory(spec, 2048, 0, 2) > 2048 * 3 * 14336 * 2
    assert step_memory(spec, 1, 256, 2) > 256 * 128256 * 8
