"""Memory for packed weights: zeros, aligned, and never the same bytes twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from paged_backend.kernels.cpu.arena import Arena


def test_tensors_of_many_threads_are_zeros_aligned_and_apart() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 5000, 3 << 20, 40 << 20] * 8

    def take(item: tuple[int, int]) -> torch.Tensor:
        number, size = item
        tensor = arena.zeros(size)
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert not tensor[:1000].any()
        assert not tensor[-1000:].any()
        return tensor.fill_(number)

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, enumerate(sizes, 1)))
    for number, tensor in enumerate(taken, 1):
        assert bool((tensor == number).all())


def test_memory_outlives_the_arena() -> None:
    tensor = Arena().zeros(1000)
    tensor.fill_(7)
    assert int(tensor.sum()) == 7000
