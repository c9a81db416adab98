"""Penalties by the interpreted kernels against the host's sampler, over tokens that lie in scattered blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs: pip install 'paged-backend[triton]'")

from paged_backend.kernels.triton.backend import TritonKernels
from paged_backend.kernels.triton.penalties import Penalties
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.sampler import SampleRow, _process
from paged_backend.sampling_params import SamplingParams

BLOCK_SIZE, BLOCKS, VOCAB = 4, 600, 1500


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_penalised_as_the_host_does_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(BLOCKS - 1) + 1)
    lens = [int(n) for n in rng.integers(1, 60, 5)] + [1030]  # one is longer than a program counts
    tables = np.zeros((len(lens), -(-1030 // BLOCK_SIZE)), np.int32)
    ids = np.full((BLOCKS, BLOCK_SIZE), VOCAB + 7, np.int64)  # what no table names must not be counted
    tokens = [rng.integers(0, 30, n) for n in lens]
    tokens[0][0] = VOCAB + 3  # a placeholder of some other kind of input
    for i, mine in enumerate(tokens):
        for start in range(0, len(mine), BLOCK_SIZE):
            tables[i, start // BLOCK_SIZE] = block = next(free)
            ids[block, : len(mine[start : start + BLOCK_SIZE])] = mine[start : start + BLOCK_SIZE]
    sequences = rng.permutation([*range(len(lens)), 1, 2])  # some draw several rows
    rows = []
    for sequence in sequences:
        mine, prompt = tokens[sequence], int(rng.integers(1, lens[sequence] + 1))
        params = SamplingParams(
            repetition_penalty=float(rng.choice([1.0, 0.7, 1.3])),
            frequency_penalty=float(rng.choice([0.0, 0.4, -0.3])),
            presence_penalty=float(rng.choice([0.0, 0.2, -1.1])),
        )
        history = TokenHistory(mine.tolist(), prompt)
        rows.append(SampleRow(params.resolved({}), history, len(mine) - prompt, 0))
    spared = 3
    prompt_lens = [row.history.num_prompt_tokens for row in rows]
    prompt_lens[spared] = -1
    raw = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    logits = raw.clone()
    by = Penalties(
        torch.from_numpy(tables),
        torch.tensor(lens, dtype=torch.int32),
        max(lens),
        torch.from_numpy(sequences.astype(np.int32)),
        torch.tensor(prompt_lens, dtype=torch.int32),
        torch.tensor([row.params.repetition_penalty for row in rows], dtype=torch.float32),
        torch.tensor([row.params.frequency_penalty for row in rows], dtype=torch.float64),
        torch.tensor([row.params.presence_penalty for row in rows], dtype=torch.float64),
    )
    TritonKernels("cpu", "float32").penalise(logits, torch.from_numpy(ids), by)
    for i, row in enumerate(rows):
        expected = raw[i].numpy() if i == spared else _process(raw[i].numpy(), row)
        np.testing.assert_array_equal(logits[i].numpy(), expected)
