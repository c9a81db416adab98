"""Sampling on the device, in Triton's interpreter, against the runner's sampler: the same noise, the same token."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from paged_backend.kernels.triton.backend import TritonKernels
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.sampler import Sampler, SampleRow, uniform
from paged_backend.sampling_params import SamplingParams


def draw(
    logits: torch.Tensor, params: list[SamplingParams], seeds: list[int]
) -> tuple[list[int], list[int | None]]:
    """Tokens of every row by the kernel, and by the runner's sampler (None for an error)."""
    columns = {
        "temperature": torch.tensor([p.temperature for p in params]),
        "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
        "top_p": torch.tensor([p.top_p for p in params]),
        "min_p": torch.tensor([p.min_p for p in params]),
        "noise": torch.tensor([uniform(seed, 0) for seed in seeds], dtype=torch.float64),
    }
    ours = TritonKernels("cpu", "float32").sample(logits, **columns).tolist()
    rows = [SampleRow(p, TokenHistory([], 0), 0, seed) for p, seed in zip(params, seeds)]
    theirs = [
        None if isinstance(r, Exception) else r.token_id for r in Sampler().sample(logits.numpy(), rows)
    ]
    return ours, theirs


def resolved(**options: float) -> SamplingParams:
    return SamplingParams(**options).resolved({})  # type: ignore[arg-type]


def test_the_same_noise_draws_the_same_token() -> None:
    choice = random.Random(0)
    params = [
        resolved(
            temperature=choice.choice([0.3, 1.0, 2.0]),
            top_k=choice.choice([0, 1, 3, 50]),
            top_p=choice.choice([1.0, 0.9, 0.5, 0.01]),
            min_p=choice.choice([0.0, 0.05]),
        )
        for _ in range(10)
    ]
    logits = torch.randn(len(params), 90) * 3
    logits[3:5] = logits[3:5].round()  # ties, at every edge
    logits[5, 1:] = float("-inf")
    ours, theirs = draw(logits, params, list(range(len(params))))
    assert ours == theirs


def test_greedy_takes_the_first_of_equal_maxima_and_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((2, 20), -1.0)
    logits[0, [4, 9]] = 3.0
    logits[1, [2, 6]] = torch.tensor([-0.0, 0.0])
    params = [resolved(temperature=0), resolved(temperature=1, top_k=1)]
    ours, theirs = draw(logits, params, [0, 1])
    assert ours[0] == theirs[0] == 4
    assert ours[1] == theirs[1]


def test_in_a_vocabulary_of_several_blocks_the_lowest_id_wins_wherever_it_lies_in_its_block() -> None:
    """Blocks are of 2048: ids 2100 and 4148 share a lane, 4100 lies in an earlier one."""
    logits = torch.randn(3, 5000)
    logits[:, [2100, 4100, 4148]] = 9.0
    logits[1, 4999], logits[2, 4999] = 9.5, float("nan")
    ours, theirs = draw(logits, [resolved(temperature=0)] * 3, [0, 1, 2])
    assert ours == [2100, 4999, -1]
    assert theirs == [2100, 4999, None]


def test_rows_that_are_not_finite_are_told_apart() -> None:
    logits = torch.randn(4, 30)
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    logits[2] = float("-inf")
    ours, theirs = draw(logits, [resolved(temperature=t) for t in (1.0, 0.0, 1.0, 1.0)], [0, 1, 2, 3])
    assert ours[:3] == [-1, -1, -1]
    assert theirs[:3] == [None, None, None]
    assert ours[3] == theirs[3]


def test_a_tiny_temperature_leaves_the_maximum() -> None:
    logits = torch.randn(2, 30)
    ours, _ = draw(logits, [resolved(temperature=t) for t in (1e-5, 1e-30)], [0, 1])
    assert ours == logits.argmax(-1).tolist()


def test_a_row_does_not_depend_on_the_others_and_may_be_strided() -> None:
    logits = torch.randn(3, 50)
    params = [resolved(temperature=1.0, top_p=0.8) for _ in range(3)]
    ours, _ = draw(logits, params, [5, 6, 7])
    assert draw(logits[1:2], params[:1], [6])[0] == ours[1:2]
    wide = torch.full((3, 64), float("nan"))
    wide[:, :50] = logits
    assert draw(wide[:, :50], params, [5, 6, 7])[0] == ours
    with pytest.raises(ValueError, match="float32"):
        draw(logits.bfloat16(), params, [5, 6, 7])


@pytest.mark.slow
def test_draws_follow_the_distribution() -> None:
    """Chi-square over 2000 draws; the bound is that of one false alarm in 10,000."""
    values, count = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0]), 2000
    logits = values.expand(count, -1).contiguous()
    ours, _ = draw(logits, [resolved(temperature=1.3)] * count, list(range(count)))
    expected = (values / 1.3).softmax(0).double().numpy() * count
    seen = np.bincount(ours, minlength=6)
    assert ((seen - expected) ** 2 / expected).sum() < 25.7


@pytest.mark.slow
def test_a_vocabulary_of_many_blocks() -> None:
    logits = torch.randn(6, 49152) * 3
    params = [
        resolved(temperature=0),
        resolved(temperature=1.0),
        resolved(temperature=0.7, top_k=50),
        resolved(temperature=0.7, top_p=0.95),
        resolved(temperature=1.0, top_k=1000, top_p=0.9, min_p=0.01),
        resolved(temperature=1.5, min_p=0.1),
    ]
    ours, theirs = draw(logits, params, [3, 4, 5, 6, 7, 8])
    assert ours == theirs
