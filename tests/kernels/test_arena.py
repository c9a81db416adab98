"""Memory for packed weights: zeros, aligned, and never the same bytes twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paged_backend.kernels.cpu.arena import Arena


def test_arrays_of_many_threads_are_zeros_aligned_and_apart() -> None:
    arena = Arena()
    sizes = [1, 63, 64, 65, 5000, 3 << 20, 40 << 20] * 8

    def take(item: tuple[int, int]) -> np.ndarray:
        number, size = item
        array = arena.zeros(size)
        assert array.shape == (size,)
        assert array.ctypes.data % 64 == 0
        assert not array[:1000].any()
        assert not array[-1000:].any()
        array.fill(number)
        return array

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, enumerate(sizes, 1)))
    for number, array in enumerate(taken, 1):
        assert bool((array == number).all())


def test_memory_outlives_the_arena() -> None:
    array = Arena().zeros(1000)
    array.fill(7)
    assert int(array.sum()) == 7000
