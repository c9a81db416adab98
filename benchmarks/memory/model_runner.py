"""A real model under our side of the memory benchmark: its steps are computed, its requests end as the trace says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_backend.bench.memory import TraceRunner
from paged_backend.bench.traces import TraceRequest
from paged_backend.config import EngineConfig
from paged_backend.engine.factory import kernels_for, make_runner, sliding_window
from paged_backend.models.loading import load_model
from paged_backend.runner.base import Runner


class ModelTraceRunner(TraceRunner):
    """Runs the model, and then answers as the trace says, whatever the model did."""

    def __init__(self, trace: Sequence[TraceRequest], model: Runner) -> None:
        super().__init__(trace)
        self._model = model
        self.vocab_size = model.vocab_size

    def run(self, works: Sequence[Any]) -> list[Any]:
        self._model.run(works)
        return super().run(works)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(pairs)


def open_model(config: EngineConfig, trace: Sequence[TraceRequest]) -> tuple[ModelTraceRunner, int | None]:
    """A runner for ``run_paged`` on ``config.num_blocks`` blocks, and the model's sliding window."""
    kernels = kernels_for(config)
    loaded = load_model(config, kernels)
    assert config.num_blocks is not None
    model = make_runner(config, kernels, loaded, config.num_blocks)
    return ModelTraceRunner(trace, model), sliding_window(loaded.spec)
