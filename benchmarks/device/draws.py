"""The device's draws against their definition (``runner.sampler``) in float64.

A GPU's exponentials are approximate and sums are rounded, so the token may be a neighbour of the right one where the
noise falls on their border. What must hold is that the noise falls into the drawn token's part of the cumulative
distribution, but for a small distance; and that the token is among those that top-k, top-p and min-p keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paged_backend.kernels.triton.backend import TritonKernels
from paged_backend.kernels.triton.penalties import Penalties
from paged_backend.runner.device_rows import sampling_columns
from paged_backend.runner.history import TokenHistory
from paged_backend.runner.sampler import SampleRow
from paged_backend.sampling_params import SamplingParams

_CASES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.2),
)


def draws(kernels: TritonKernels, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of float32 logits, greedy or truncated in turn.

    Returns for each row what is nearest to its noise in the token's part (see :func:`nearest`), and the noise.
    """
    rows = [
        SampleRow(_CASES[seed % len(_CASES)].resolved({}), TokenHistory([], 0), 0, seed)
        for seed in range(logits.shape[0])
    ]
    columns = {name: torch.from_numpy(column) for name, column in sampling_columns(rows).items()}
    sent = {name: column.to(kernels.torch_device) for name, column in columns.items()}
    tokens = kernels.sample(logits, **sent).tolist()
    found = [
        nearest(values.to("cpu", torch.float64), token, {name: c[i].item() for name, c in columns.items()})
        for i, (values, token) in enumerate(zip(logits, tokens))
    ]
    return torch.tensor(found, dtype=torch.float64), columns["noise"]


def penalised(kernels: TritonKernels, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Penalise rows of float32 logits [R, V] for up to 200 tokens in scattered blocks. Returns these, and float64's."""
    rows, vocab = logits.shape
    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(1, 200, (rows,), generator=generator)
    prompts = (lens * torch.rand(rows, generator=generator)).long()
    table = torch.randperm(rows * 13, generator=generator).view(rows, 13) + 1
    ids = torch.randint(0, min(vocab, 40), (rows * 13 + 1, 16), generator=generator)
    repetition = 0.8 + torch.rand(rows, generator=generator)
    frequency, presence = (torch.rand(rows, generator=generator, dtype=torch.float64) - 0.3 for _ in range(2))
    expected = logits.to("cpu", torch.float64)
    for i, values in enumerate(expected):
        context = ids[table[i]].view(-1)[: lens[i]]
        seen, made = context.unique(), context[prompts[i] :].bincount(minlength=vocab)
        values[seen] = torch.where(
            values[seen] < 0, values[seen] * repetition[i], values[seen] / repetition[i]
        )
        values -= frequency[i] * made + presence[i] * (made > 0)
    whole = [t.to(torch.int32) for t in (table, lens, torch.arange(rows), prompts)]
    device = kernels.torch_device
    got = logits.clone()
    sent = [t.to(device) for t in (*whole, repetition, frequency, presence)]
    kernels.penalise(got, ids.to(device), Penalties(sent[0], sent[1], 200, *sent[2:]))
    return got, expected


def nearest(logits: Tensor, token: int, row: Mapping[str, float]) -> float:
    """The number nearest to the noise in the token's part of the cumulative distribution; NaN if it is not to be drawn.

    logits: float64 [V]. row: ``temperature`` (0 for greedy), ``top_k`` (0 for all), ``top_p``, ``min_p``, ``noise``.
    """
    if row["temperature"] == 0:
        return row["noise"] if token == int(logits.argmax()) else math.nan
    weights = torch.exp((logits - logits.max()) / row["temperature"])
    kept = torch.ones_like(weights, dtype=torch.bool)
    if 0 < row["top_k"] < len(logits):
        kept = logits >= logits.topk(int(row["top_k"])).values[-1]
    if row["top_p"] < 1:
        order = torch.argsort(weights * kept, descending=True, stable=True)
        mass = (weights * kept)[order]
        kept[order[mass.cumsum(0) - mass >= row["top_p"] * mass.sum()]] = False
    kept &= weights >= row["min_p"]
    if token < 0 or not kept[token]:
        return math.nan
    mass = (weights * kept).cumsum(0)
    low, high = ((mass[token] - weights[token]) / mass[-1]).item(), (mass[token] / mass[-1]).item()
    return min(max(row["noise"], low), high)
