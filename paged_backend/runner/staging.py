"""Staging: the arrays of a step on their way to a device, in one copy.

The host writes them side by side into page-locked memory, and one asynchronous copy brings them over; a copy per array
would cost some ten microseconds each, and pageable memory would make the host wait. There are two host buffers, so that
the next step can be written while the last one's copy is still under way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # what kernels may assume of a pointer


class Staging:
    """Room for the arrays of one step. device: where they go; on the CPU (tests) the copy is a plain one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._hosts: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._pinned else []
        self._turn = 0
        self._room = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, arrays: Mapping[str, np.ndarray], room: Tensor | None = None) -> dict[str, Tensor]:
        """Copy ``arrays`` over and return them as tensors of the same names, dtypes and shapes.

        They are overwritten by the next call. room: uint8 memory on the device to put them into, of :func:`room_for`
        bytes at least; the same shapes always lie at the same places of it. Without it there is as much as needed.
        """
        size = room_for(arrays)
        if room is None:
            if len(self._room) < size:
                self._room = torch.empty(2 * size, dtype=torch.uint8, device=self.device)
            room = self._room
        host = self._host(size)
        view = host.numpy()
        places: list[tuple[str, int, np.ndarray]] = []
        at = 0
        for name, array in arrays.items():
            view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            places.append((name, at, array))
            at += _aligned(array.nbytes)
        room[:at].copy_(host[:at], non_blocking=True)
        if self._pinned:
            self._copied[self._turn].record()
        return {
            name: room[at : at + array.nbytes].view(_torch_type(array.dtype)).view(array.shape)
            for name, at, array in places
        }

    def _host(self, size: int) -> Tensor:
        """The buffer whose turn it is, with its last copy done."""
        self._turn = 1 - self._turn
        if self._pinned:
            self._copied[self._turn].synchronize()  # two steps ago: done long since
        if len(self._hosts[self._turn]) < size:
            self._hosts[self._turn] = torch.empty(
                2 * size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
            )
        return self._hosts[self._turn]


def room_for(arrays: Mapping[str, np.ndarray]) -> int:
    """Bytes that ``arrays`` take side by side."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _torch_type(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
