"""Where the time of one decode step goes: inside kernels, and outside of them part by part.

The engine is the real one, with its two threads; timers are laid around its parts. What the output thread does (text, waking
readers) has no row of its own: it runs between the parts, on the same interpreter, and shows as ``other``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

PARTS = ("C code", "kernel calls", "schedule", "build work", "build batch", "forward", "sampler", "update", "other")
"""``kernel calls``: allocating outputs and passing pointers around the C code; with the torch kernels everything is
there. ``forward``: the decoder's own Python. ``update``: appending tokens, retiring, statistics. ``other``: between two steps."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Median milliseconds per step of each part, for ``running`` decodes."""

    running: int
    steps: int
    wall_ms: float
    parts: dict[str, float]

    @property
    def outside(self) -> float:
        """Share of the step that is neither C code nor the calls around it."""
        return 1 - (self.parts["C code"] + self.parts["kernel calls"]) / self.wall_ms

    @property
    def outside_c(self) -> float:
        """The same, with the calls around the C code counted as outside."""
        return 1 - self.parts["C code"] / self.wall_ms


class Timers:
    """Seconds spent under each name, outermost call only where a name calls itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._depth: dict[str, int] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds, depth, clock = self.seconds, self._depth, time.perf_counter
        seconds.setdefault(name, 0.0)
        depth.setdefault(name, 0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if depth[name]:
                return function(*args, **kwargs)
            depth[name] = 1
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += clock() - start
                depth[name] = 0

        return timed


class _TimedLibrary:
    """A ctypes library whose functions are timed."""

    def __init__(self, library: Any, timers: Timers) -> None:
        self._library, self._timers = library, timers

    def __getattr__(self, name: str) -> Any:
        timed = self._timers.wrap("C code", getattr(self._library, name))
        setattr(self, name, timed)  # found directly from now on
        return timed


_OPERATIONS = (
    "linear", "embedding", "rms_norm", "add_rms_norm", "rotary_and_cache", "plan", "paged_attention", "act_and_mul",
    "copy_blocks",
)  # fmt: skip


def profile_steps(model: str, running: list[int], steps: int = 50, context: int = 128, **options: Any) -> list[StepProfile]:
    """Profile ``steps`` decode steps with each number of ``running`` requests whose contexts begin at ``context`` tokens.

    options: fields of ``EngineConfig``. Raises ValueError for a number of steps or requests that cannot be measured.
    """
    if steps < 3 or any(n < 1 for n in running):
        raise ValueError("steps must be at least 3 and running requests at least 1")
    import torch

    from paged_backend.cache.manager import CacheManager
    from paged_backend.config import EngineConfig
    from paged_backend.engine.async_engine import Engine
    from paged_backend.engine.engine import EngineCore
    from paged_backend.engine.factory import pool_blocks, sliding_window
    from paged_backend.engine.scheduler import Scheduler
    from paged_backend.kernels.select import select_kernels
    from paged_backend.models.loading import load_model
    from paged_backend.runner.model_runner import ModelRunner
    from paged_backend.tokenizer import load_tokenizer

    config = EngineConfig.from_options(model, **options)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    kernels: Any = select_kernels(config.kernels, config.threads)
    timers = Timers()
    timers.wrap("C code", lambda: None)  # a row of zeros where there is no C library
    if hasattr(kernels, "_lib"):
        kernels._lib = _TimedLibrary(kernels._lib, timers)
    for name in _OPERATIONS:
        setattr(kernels, name, timers.wrap("kernels", getattr(kernels, name)))
    loaded = load_model(config, kernels)
    blocks = pool_blocks(config, loaded.max_model_len, ModelRunner.block_bytes(loaded.spec, config.block_size))
    runner: Any = ModelRunner(loaded.decoder, kernels, config.num_blocks or blocks, config.block_size)
    cache = CacheManager(
        config.num_blocks or blocks, config.block_size, sliding_window(loaded.spec), config.enable_prefix_caching
    )
    scheduler: Any = Scheduler(
        cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    core: Any = EngineCore(runner, cache, scheduler, loaded.max_model_len)
    scheduler.schedule = timers.wrap("schedule", scheduler.schedule)
    core._work = timers.wrap("build work", core._work)
    runner.model.forward = timers.wrap("forward", runner.model.forward)
    runner.sampler.sample = timers.wrap("sampler", runner.sampler.sample)
    runner.run = timers.wrap("run", runner.run)
    record = _Recorder(core, timers)
    core.step = record.step
    tokenizer = load_tokenizer(loaded.tokenizer_source, loaded.checkpoint)
    with Engine(core, tokenizer, config) as engine:
        return [_profile(engine, record, count, steps, context) for count in running]


class _Recorder:
    """Notes begin, end and timers of every step that is decodes only."""

    def __init__(self, core: Any, timers: Timers) -> None:
        self._core, self._timers, self._step = core, timers, core.step
        self.rows: list[tuple[int, float, float, dict[str, float]]] = []  # requests (0: not all decodes), begin, end, timers

    def step(self) -> Any:
        before = self._core.scheduler.stats.scheduled_tokens
        begin = time.perf_counter()
        updates = self._step()
        end = time.perf_counter()
        count = len(updates)
        pure = self._core.scheduler.stats.scheduled_tokens - before == count
        self.rows.append((count if pure else 0, begin, end, dict(self._timers.seconds)))
        return updates


def _profile(engine: Any, record: _Recorder, running: int, steps: int, context: int) -> StepProfile:
    import random

    from paged_backend.sampling_params import SamplingParams

    record.rows.clear()
    rng = random.Random(running)
    vocab = engine.tokenizer.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(context)]} for _ in range(running)]
    # the first requests begin to decode while the last ones are still prefilled
    spare = -(-running * context // engine.config.max_num_batched_tokens) + 8
    params = SamplingParams(temperature=0, max_tokens=steps + spare, ignore_eos=True)
    for handle in engine.submit_many(prompts, [params] * running):
        handle.result()
    samples: dict[str, list[float]] = {name: [] for name in PARTS}
    walls = []
    rows = record.rows
    for previous, current in zip(rows, rows[1:]):
        if previous[0] != running or current[0] != running:
            continue
        wall = current[2] - previous[2]  # from end to end, so that the time between steps belongs to one of them
        used = {name: current[3][name] - previous[3].get(name, 0.0) for name in current[3]}
        inside = current[2] - current[1]
        walls.append(wall)
        samples["C code"].append(used["C code"])
        samples["kernel calls"].append(used["kernels"] - used["C code"])
        samples["schedule"].append(used["schedule"])
        samples["build work"].append(used["build work"])
        samples["build batch"].append(used["run"] - used["forward"] - used["sampler"])
        samples["forward"].append(used["forward"] - used["kernels"])
        samples["sampler"].append(used["sampler"])
        samples["update"].append(inside - used["run"] - used["schedule"] - used["build work"])
        samples["other"].append(wall - inside)
    if not walls:
        raise ValueError(f"{running} requests never ran together: raise max_num_seqs or the KV pool")
    parts = {name: 1000 * median(values[-steps:]) for name, values in samples.items()}
    return StepProfile(running, len(walls[-steps:]), 1000 * median(walls[-steps:]), parts)
