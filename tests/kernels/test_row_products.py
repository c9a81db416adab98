"""The reference kernels too give a token the same bits whatever is beside it: rows, chunks, windows, threads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from caches import poisoned_cache
from packing import pack
from tensors import OnTensors

from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.reference import ReferenceKernels
from paged_backend.kernels.row_products import LANES, from_lanes, row_linear, to_lanes
from paged_backend.kernels.triton.backend import TritonKernels

SHAPES = [(1, 1), (1, 700), (2, 3), (5, 7), (48, 64), (100, 37), (250, 129), (577, 192), (40, 1500)]


@pytest.mark.parametrize("count", [0, 1, LANES - 1, LANES, LANES + 1, 50])
def test_lanes_are_the_rows_and_back(count: int) -> None:
    rows = np.random.default_rng(0).random((3, count, 5)).astype(np.float32)
    assert np.array_equal(from_lanes(to_lanes(rows), count), rows)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_is_the_product_and_the_same_bits_wherever_it_stands(n: int, k: int) -> None:
    generator = np.random.default_rng(0)
    weight, bias, x = (generator.standard_normal(s).astype(np.float32) for s in ((n, k), n, (70, k)))
    whole = row_linear(x, weight, bias)
    wide = weight.astype(np.float64)
    size = np.abs(x) @ np.abs(wide.T) + np.abs(bias)
    assert (np.abs(whole - (x @ wide.T + bias)) <= 1e-6 * size).all()
    for count in range(1, 40):
        start = int(generator.integers(0, 70 - count))
        assert np.array_equal(
            row_linear(x[start : start + count], weight, bias), whole[start : start + count]
        )
    order = generator.permutation(70)
    assert np.array_equal(row_linear(x[order], weight, bias), whole[order])


def test_the_number_of_threads_changes_no_bit() -> None:
    code = (
        "import hashlib, numpy as np; from paged_backend.kernels.row_products import row_linear\n"
        "draw, digest = np.random.default_rng(0).standard_normal, hashlib.sha256()\n"
        "for n, k in ((577, 192), (1500, 700), (3000, 64), (64, 3000)):\n"
        "    x, w = draw((40, k)).astype(np.float32), draw((n, k)).astype(np.float32)\n"
        "    digest.update(row_linear(x, w, None).tobytes())\n"
        "print(digest.hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", f"import os; os.environ['OPENBLAS_NUM_THREADS'] = '{threads}'\n{code}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for threads in (1, 2, 3)
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    "kernels", [OnTensors(ReferenceKernels()), TritonKernels("cpu", "float32")], ids=["torch", "triton"]
)
@pytest.mark.parametrize("width", [10, 74, 602])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_every_operation_on_rows_gives_each_the_same_bits_alone(
    kernels: ReferenceKernels, width: int, activation: str
) -> None:
    x, other, norm = torch.randn(33, width) * 3, torch.randn(33, width), torch.randn(width)
    packed = pack(kernels, [torch.randn(31, width)], [torch.randn(31)])

    def results(rows: slice) -> list[torch.Tensor]:
        residual = other[rows].clone()
        return [
            kernels.linear(x[rows], packed),
            kernels.rms_norm(x[rows], norm, 1e-5),
            kernels.add_rms_norm(x[rows], residual, norm, 1e-5),
            kernels.act_and_mul(x[rows], activation),
        ]

    whole = results(slice(0, 33))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(16, 33)):
        for one, all_ in zip(results(rows), whole):
            assert torch.equal(one, all_[rows])


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_attention_is_the_same_bits_in_every_chunk(
    window: int | None, sinks: torch.Tensor | None, dtype: torch.dtype
) -> None:
    kernels, length, size = OnTensors(ReferenceKernels()), 150, 16
    blocks = torch.randperm(19)[:10].to(torch.int32) + 1
    q, key, value = (torch.randn(length, heads, 12) for heads in (4, 2, 2))
    cache = poisoned_cache(20, 2, 12, size, dtype)
    no_rotation = torch.empty(length, 0)
    slots = blocks[torch.arange(length) // size].long() * size + torch.arange(length) % size
    kernels.rotary_and_cache(q.clone(), key, value, no_rotation, no_rotation, cache, slots)

    def attend(start: int, stop: int) -> torch.Tensor:
        inputs = AttentionInputs(
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            blocks[None],
            slots[start:stop],
        )
        plan = kernels.plan(inputs)
        return kernels.paged_attention(plan, q[start:stop], cache, 0.3, window, 20.0, sinks)

    whole = attend(0, length)
    assert whole.isfinite().all()
    for start, stop in ((0, 1), (0, 17), (17, 64), (63, 65), (64, 128), (100, 150), (149, 150)):
        assert torch.equal(attend(start, stop), whole[start:stop]), (start, stop)
