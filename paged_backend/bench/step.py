"""Where the time of one decode step goes: inside kernels, and outside of them part by part.

The engine is the real one, with its two threads; timers are laid around its parts. What the output thread does (text,
waking readers) has no row of its own: on one core it takes its time from whatever part runs then.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

PARTS = (
    "C code",
    "kernel calls",
    "schedule",
    "build work",
    "build batch",
    "forward",
    "sampler",
    "update",
    "other",
)
"""``kernel calls``: allocating outputs and passing pointers around the C code; with the torch kernels everything is
there. ``forward``: the decoder's own Python. ``update``: appending tokens, retiring, statistics. ``other``: between
two steps."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Median milliseconds of each part over the fastest quarter of the steps (those that the machine disturbed least),
    for ``running`` decodes."""

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


def profile_steps(
    model: str, running: list[int], steps: int = 50, context: int = 128, **options: Any
) -> list[StepProfile]:
    """Profile ``steps`` decode steps for each number of ``running`` requests; contexts begin at ``context`` tokens.

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
    blocks = pool_blocks(
        config, loaded.max_model_len, ModelRunner.block_bytes(loaded.spec, config.block_size)
    )
    runner: Any = ModelRunner(loaded.decoder, kernels, config.num_blocks or blocks, config.block_size)
    cache = CacheManager(
        config.num_blocks or blocks,
        config.block_size,
        sliding_window(loaded.spec),
        config.enable_prefix_caching,
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


_Note = tuple[int, float, float, dict[str, float]]


class _Recorder:
    """Notes of every step: the requests if all of them decoded (else 0), begin, end, and the timers at its end."""

    def __init__(self, core: Any, timers: Timers) -> None:
        self._core, self._timers, self._step = core, timers, core.step
        self.rows: list[_Note] = []

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
    found = []
    for previous, current in itertools.pairwise(record.rows):
        if previous[0] == running and current[0] == running:
            found.append(_split(previous, current))
    if not found:
        raise ValueError(f"{running} requests never ran together: raise max_num_seqs or the KV pool")
    found.sort(key=lambda parts: parts["step"])
    quiet = found[: max(3, len(found) // 4)]
    parts = {name: 1000 * median(p[name] for p in quiet) for name in ("step", *PARTS)}
    return StepProfile(running, len(quiet), parts.pop("step"), parts)


def _split(previous: _Note, current: _Note) -> dict[str, float]:
    """Seconds of each part, from the end of one step to the end of the next, so that what lies between is counted."""
    _, begin, end, timers = current
    used = {name: seconds - previous[3].get(name, 0.0) for name, seconds in timers.items()}
    wall, inside = end - previous[2], end - begin
    return {
        "step": wall,
        "C code": used["C code"],
        "kernel calls": used["kernels"] - used["C code"],
        "schedule": used["schedule"],
        "build work": used["build work"],
        "build batch": used["run"] - used["forward"] - used["sampler"],
        "forward": used["forward"] - used["kernels"],
        "sampler": used["sampler"],
        "update": inside - used["run"] - used["schedule"] - used["build work"],
        "other": wall - inside,
    }
