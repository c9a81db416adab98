"""Chunks of a long prompt: as many tokens as cost about the same, wherever they are."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from paged_backend.cache.manager import CacheManager
from paged_backend.engine.chunking import ChunkCost, chunk_cost
from paged_backend.engine.request import Request
from paged_backend.engine.scheduler import Scheduler
from paged_backend.models.architectures import spec_from_config
from paged_backend.sampling_params import SamplingParams

WEIGHTS = st.floats(1e-6, 1.0)


@given(WEIGHTS, st.integers(1, 100_000), st.integers(0, 100_000), st.integers(1, 4096))
def test_a_chunk_fits_the_budget_and_is_never_empty(weight, pending, computed, budget):
    cost = ChunkCost(weight)
    count = cost.chunk(pending, computed, budget)
    assert 1 <= count <= min(pending, budget)
    assert cost.cost(count, computed) >= count
    assert cost.cost(count, computed) <= budget or count <= 16


@given(WEIGHTS, st.integers(100, 4096), st.integers(0, 50_000))
def test_deeper_chunks_are_never_longer(weight, budget, computed):
    cost = ChunkCost(weight)
    assert cost.chunk(10**6, computed + 1000, budget) <= cost.chunk(10**6, computed, budget)


@given(st.integers(1, 10_000), st.integers(0, 100_000), st.integers(1, 4096))
def test_without_a_weight_only_tokens_count(pending, computed, budget):
    cost = ChunkCost()
    assert cost.chunk(pending, computed, budget) == min(pending, budget)
    assert cost.cost(pending, computed) == pending


def steps_of_a_long_prompt(weight: float, length: int, budget: int) -> list[tuple[int, int]]:
    """(tokens before, tokens) of each chunk of one prompt."""
    cache = CacheManager(length // 16 + 10, 16)
    scheduler = Scheduler(cache, max_num_batched_tokens=budget, chunk_cost=ChunkCost(weight))
    request = Request("a", list(range(length)), SamplingParams(), seed=0, stop_ids=(), max_tokens=1)
    scheduler.add(request)
    steps = []
    while request.num_computed < length:
        ((_, count),) = scheduler.schedule().items()
        steps.append((request.num_computed, count))
        request.num_computed += count
        cache.commit(request.table, request.token_ids, request.num_computed)
    return steps


def test_the_steps_of_a_long_prompt_cost_about_the_same():
    weight = 1 / 1500
    steps = steps_of_a_long_prompt(weight, 8000, 512)
    costs = [count * (1 + weight * (before + count / 2)) for before, count in steps[:-1]]
    assert sum(count for _, count in steps) == 8000
    assert max(costs) <= 1.3 * min(costs)
    plain = [
        count * (1 + weight * (before + count / 2)) for before, count in steps_of_a_long_prompt(0, 8000, 512)
    ]
    assert max(plain) > 3 * min(plain)


def test_a_prompt_of_a_few_hundred_tokens_stays_whole():
    assert steps_of_a_long_prompt(1 / 1500, 500, 512) == [(0, 500)]


def test_layers_with_a_window_do_not_count_as_attention():
    config = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }
    full = chunk_cost(spec_from_config({**config, "sliding_window": None}))
    # 2 * 4 * 16 multiplications per token of context and layer; 64 * (192 + 384) for the weights of one
    assert full.context_weight == 2 * 128 / (64 * 576)
    assert chunk_cost(spec_from_config({**config, "sliding_window": 64})).context_weight == 0.0
    unknown = dataclasses.replace(spec_from_config({**config, "sliding_window": None}), intermediate_size=0)
    assert chunk_cost(unknown).context_weight == 2 * 128 / (64 * (192 + 8 * 64))
