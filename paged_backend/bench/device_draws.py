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
from paged_backend.runner.device_runner import sampling_columns
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
        SampleRow(_CASES[seed % len(_CASES)].resolved({}), [], [], seed) for seed in range(logits.shape[0])
    ]
    columns = {name: torch.from_numpy(column) for name, column in sampling_columns(rows).items()}
    sent = {name: column.to(kernels.device) for name, column in columns.items()}
    tokens = kernels.sample(logits, **sent).tolist()
    found = [
        nearest(values.to("cpu", torch.float64), token, {name: c[i].item() for name, c in columns.items()})
        for i, (values, token) in enumerate(zip(logits, tokens))
    ]
    return torch.tensor(found, dtype=torch.float64), columns["noise"]


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
