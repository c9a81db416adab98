"""The memory benchmark: what its figures must satisfy, and the promise that paged KV wastes less than 4 %."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.memory.arena import BuddyArena, FirstFitArena
from benchmarks.memory.contiguous import PLACEMENTS, POLICIES, reservation, run_contiguous
from paged_backend.bench.memory import CATEGORIES, run_paged
from paged_backend.bench.traces import TraceRequest, make_trace

CONTEXT, POOL = 256, 1000
SMALL = {"pool_tokens": POOL, "context": CONTEXT, "max_num_seqs": 16, "max_num_batched_tokens": 64}

requests = st.builds(
    TraceRequest,
    st.integers(1, 120),
    st.integers(1, 120),
    st.floats(0, 60),
)
traces = st.lists(requests, min_size=1, max_size=20)


def every_allocator(trace):
    yield run_paged(trace, **SMALL)
    for placement in PLACEMENTS:
        for policy in POLICIES:
            yield run_contiguous(trace, policy, placement=placement, **SMALL)


# --- what holds for any trace ----------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(traces)
def test_after_each_step_every_slot_of_the_pool_is_in_exactly_one_state(trace):
    for run in every_allocator(trace):
        for sample in run.samples:
            states = [getattr(sample, name) for name in CATEGORIES]
            assert min(states) >= 0
            assert sum(states) == run.pool_tokens
        assert sum(run.shares().values()) == pytest.approx(1)


@settings(max_examples=15)
@given(traces)
def test_every_allocator_computes_the_whole_trace_and_only_preemption_computes_more(trace):
    needed = sum(r.prompt_tokens + r.output_tokens - 1 for r in trace)
    for run in every_allocator(trace):
        assert run.computed_tokens >= needed
        if not run.preemptions:
            assert run.computed_tokens == needed
        assert run.samples[-1].running == run.samples[-1].waiting == 0


@settings(max_examples=15)
@given(traces)
def test_the_oracle_has_no_internal_and_paging_no_external_fragmentation(trace):
    for placement in PLACEMENTS:
        oracle = run_contiguous(trace, "oracle", placement=placement, **SMALL)
        assert all(sample.internal == 0 for sample in oracle.samples)
    assert all(sample.external == 0 for sample in run_paged(trace, **SMALL).samples)


@given(requests)
def test_reservations_are_ordered_and_pow2_at_most_doubles_the_output(request):
    oracle, pow2, most = (reservation(policy, request, CONTEXT) for policy in ("oracle", "pow2", "max"))
    assert oracle <= pow2 <= most == CONTEXT
    assert pow2 < request.prompt_tokens + 2 * request.output_tokens


# --- against reservation --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharegpt():
    return make_trace("sharegpt", 96, seed=1)


@pytest.fixture(scope="module")
def paged(sharegpt):
    return run_paged(sharegpt, pool_tokens=15728)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_more_requests_run_at_once_than_with_any_reservation(sharegpt, paged, policy, placement):
    baseline = run_contiguous(sharegpt, policy, pool_tokens=15728, placement=placement)
    assert paged.mean_running > baseline.mean_running
    assert paged.waste < baseline.waste
    assert len(paged.samples) < len(baseline.samples)


def test_reserving_the_whole_context_lets_seven_run_in_the_paper_s_pool(sharegpt):
    assert run_contiguous(sharegpt, "max", pool_tokens=15728).peak_running == 15728 // 2048


# --- arenas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FirstFitArena, BuddyArena])
@given(seed=st.integers(0, 10**6))
def test_an_arena_never_hands_out_a_slot_twice_and_heals_when_all_is_given_back(make, seed):
    rng = random.Random(seed)
    arena, held = make(777), {}
    for _ in range(120):
        if held and rng.random() < 0.45:
            arena.release(address := rng.choice(list(held)))
            del held[address]
        else:
            size = rng.randint(1, 200)
            address = arena.allocate(size)
            if address is not None:
                held[address] = size
        ends = sorted((a, a + size) for a, size in held.items())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
        assert all(a >= 0 and stop <= 777 for a, stop in ends)
        assert arena.used == sum(held.values())
    for address in list(held):
        arena.release(address)
    assert arena.used == 0
    largest = 777 if make is FirstFitArena else 512
    assert arena.fits_empty(largest)
    assert arena.allocate(largest) is not None


def test_buddies_stand_on_multiples_of_their_size():
    arena = BuddyArena(64)
    assert [arena.allocate(size) for size in (5, 16, 3)] == [0, 16, 8]
    assert not arena.fits_empty(65)


# --- the command -----------------------------------------------------------------------------------------------------

FLAGS = [
    "memory",
    "--requests",
    "12",
    "--pool-tokens",
    "2100",
    "--context",
    "512",
    "--trace",
    "alpaca",
]


def test_the_command_prints_a_table_and_writes_json_and_a_picture(tmp_path):
    figures, picture = tmp_path / "m.json", tmp_path / "m.png"
    result = CliRunner().invoke(app, [*FLAGS, "--json", str(figures), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    for name in ("paged", *POLICIES, *CATEGORIES):
        assert name in result.stdout
    data = json.loads(figures.read_text())
    assert [run["name"] for run in data["runs"]] == ["paged", *POLICIES]
    assert len(data["runs"][0]["samples"]) == data["runs"][0]["steps"]
    assert len(data["trace"]) == 12
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--trace", "/nonexistent.jsonl"], 1, "nonexistent"),
        (["--pool-tokens", "100"], 1, "raise the pool"),
        (["--placement", "magic"], 2, "first-fit"),
        (["--num-blocks", "9"], 2, "--pool-tokens"),
        (["--block-size", "3"], 2, "power of two"),
    ],
)
def test_bad_options_end_with_a_clear_message(flags, status, message):
    result = CliRunner().invoke(app, [*FLAGS, *flags], terminal_width=300)
    assert result.exit_code == status
    assert message in result.stderr


@pytest.mark.parametrize("command", ["memory", "latency"])
@pytest.mark.parametrize(
    ("picture", "complaint"),
    [
        ("out.png", "pip install 'paged-backend[bench]'"),
        ("out.txt", "must end in"),
        ("no/out.png", "no folder"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_computed(
    command, picture, complaint, tmp_path, monkeypatch
):
    find, absent = importlib.util.find_spec, "matplotlib" if complaint.startswith("pip") else ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    arguments = [command, "/nonexistent/model", "--plot", str(tmp_path / picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
