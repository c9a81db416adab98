"""Decode steps as CUDA graphs: several hundred kernels launched by one call.

A graph runs the same kernels on the same memory each time, so it is captured for a number of rows and a bound of the
context length, and a batch is padded to the next such size. A row of padding is a sequence of one token in the null
block. Which graph runs is invisible in the results of the kernels here; cuBLAS may choose another kernel for another
number of rows.

Graphs are captured when first needed, which takes as long as some steps; they share one pool of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paged_backend.runner.staging import Staging, room_for

_PADDING = {"seq_lens": 1, "prompt_lens": -1}
_SHORTEST = 512  # the smallest bound of the context length: what decode attention takes in one piece
_WIDENING = (
    4  # each bound is that many times the one before: few graphs, and what is beyond a context costs little
)


Outputs = tuple[Tensor, ...]

logger = logging.getLogger("paged_backend")


class Capture(Protocol):
    """Makes ``run`` repeatable: (its results, a function that computes them anew, in place, from the same inputs)."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]: ...

    def reset(self) -> None:
        """What was captured so far is not used any more."""


@dataclass(slots=True)
class _Graph:
    room: Tensor
    inputs: dict[str, Tensor]
    outputs: Outputs
    replay: Callable[[], object]


class DecodeGraphs:
    """Graphs by (variant, rows, longest context).

    forwards: variants of what a step does, (arrays on the device, bound of the context length) -> tensors on the
    device. complete: changes the arrays on the device before each run, outside the graph. capture: makes a function
    repeatable; on a GPU :class:`CudaCapture`. largest: most rows; most_context: longest context there can be.
    """

    def __init__(
        self,
        forwards: Mapping[str, Callable[[dict[str, Tensor], int], Outputs]],
        staging: Staging,
        complete: Callable[[dict[str, Tensor]], None],
        capture: Capture,
        largest: int,
        most_context: int,
        block_size: int,
    ) -> None:
        self._forwards, self._staging, self._complete = forwards, staging, complete
        self._capture = capture
        self._largest, self._most_context, self._block_size = largest, most_context, block_size
        self._graphs: dict[tuple[str, int, int], _Graph] = {}
        self._refused: set[tuple[str, int, int]] = set()

    def clear(self) -> None:
        """Forget every graph; they are captured anew when needed. None may be running."""
        self._graphs.clear()
        self._refused.clear()
        self._capture.reset()

    def run(self, variant: str, arrays: Mapping[str, np.ndarray], longest: int) -> Outputs:
        """Pad ``arrays`` (see :func:`padded`), send them over and run; the results have padded rows at the end.

        What cannot be captured, for lack of memory say, is run without a graph, with a warning.
        """
        rows = len(arrays["seq_lens"])
        key = (variant, graph_rows(rows, self._largest), graph_context(longest, self._most_context))
        filled = padded(arrays, key[1], -(-key[2] // self._block_size))
        graph = self._graphs.get(key)
        if graph is not None:
            self._staging.send(filled, graph.room)
            self._complete(graph.inputs)
            graph.replay()
            return graph.outputs
        keep = key not in self._refused
        room = None
        if keep:
            room = torch.zeros(room_for(filled), dtype=torch.uint8, device=self._staging.device)
        inputs = self._staging.send(filled, room)
        self._complete(inputs)

        def run() -> Outputs:
            return self._forwards[variant](inputs, key[2])

        if room is None:
            return run()
        try:
            outputs, replay = self._capture(run)
        except RuntimeError as error:
            logger.warning("decode steps of %d rows run without a graph: %s", key[1], error)
            self._refused.add(key)
            return run()
        self._graphs[key] = _Graph(room, inputs, outputs, replay)
        replay()
        return outputs


class CudaCapture:
    """Captures on a stream and into a pool of memory of its own; made in the thread that runs the model.

    Work spaces of libraries belong to the stream of a capture and go with its graphs, so the graphs of several engines
    must not share one, as they would on torch's default. What other threads do meanwhile (another engine, the
    caller's own code) does not disturb a capture.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def reset(self) -> None:
        """Begin a new pool: the old one goes when the last graph in it has gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes work spaces, which a capture must not
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return outputs, graph.replay


def graph_rows(rows: int, largest: int) -> int:
    """1, 2, 4, 8, then multiples of 8 up to 64 and of 32 beyond: padding stays below an eighth of a large batch."""
    if rows <= 8:
        size = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 32
        size = -(-rows // step) * step
    return min(size, max(largest, rows))


def graph_context(longest: int, most: int) -> int:
    """The next of 512, 2048, 8192 and so on, but not more than there can be."""
    bound = _SHORTEST
    while bound < longest:
        bound *= _WIDENING
    return min(bound, max(most, longest))


def padded(arrays: Mapping[str, np.ndarray], rows: int, table_width: int) -> dict[str, np.ndarray]:
    """A decode batch with rows added: sequences of one token, id 0, in slot 0 of the null block, drawn greedily and
    without penalties.

    arrays: per-row arrays [n, ...] by name, ``query_start_loc`` [n + 1], ``block_table`` [n, width], which becomes
    [rows, table_width].
    """
    filled: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name == "query_start_loc":
            filled[name] = np.arange(rows + 1, dtype=array.dtype)
        elif name == "block_table":
            table = np.zeros((rows, table_width), array.dtype)
            table[: len(array), : array.shape[1]] = array
            filled[name] = table
        else:
            out = np.full(rows, _PADDING.get(name, 0), array.dtype)
            out[: len(array)] = array
            filled[name] = out
    return filled
