"""Where the time of one decode step goes: inside kernels, and outside of them part by part.

The engine is the real one, with its two threads; marks are set where its parts begin and end. Every decode step of the
same requests passes the same marks, so the time between two marks is compared over the steps and its lower quartile is
taken: a stretch in which the machine did something else is left out.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
there. ``forward``: the decoder's own Python. ``update``: appending tokens, retiring, statistics. ``other``: between two
steps."""

_OPERATIONS = (
    "linear", "embedding", "rms_norm", "add_rms_norm", "rotary_and_cache", "plan", "paged_attention", "act_and_mul",
    "copy_blocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Milliseconds of each part in a step of ``running`` decodes; ``steps`` were measured."""

    running: int
    steps: int
    parts: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.parts.values())

    @property
    def outside(self) -> float:
        """Share of the step that is neither C code nor the calls around it."""
        return 1 - (self.parts["C code"] + self.parts["kernel calls"]) / self.total_ms

    @property
    def outside_c(self) -> float:
        """The same, with the calls around the C code counted as outside."""
        return 1 - self.parts["C code"] / self.total_ms


class Marks:
    """A list of (time, part that runs from then on), written by the functions that ``wrap`` returns."""

    def __init__(self) -> None:
        self.list: list[tuple[float, str]] = []
        self.steps: list[tuple[int, int]] = []
        """(index of the first mark, number of requests; 0 if not all of them decoded)."""
        self._stack = ["other"]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        marks, stack, clock = self.list, self._stack, time.perf_counter

        def marked(*args: Any, **kwargs: Any) -> Any:
            stack.append(part)
            marks.append((clock(), part))
            try:
                return function(*args, **kwargs)
            finally:
                stack.pop()
                marks.append((clock(), stack[-1]))

        return marked

    def wrap_step(self, core: Any) -> Callable[[], Any]:
        """``core.step``, noting where each step begins and how many requests it decoded."""
        step, stats = self.wrap("update", core.step), core.scheduler.stats

        def noted() -> Any:
            first, before = len(self.list), stats.scheduled_tokens
            updates = step()
            self.steps.append((first, len(updates) if stats.scheduled_tokens - before == len(updates) else 0))
            return updates

        return noted

    def clear(self) -> None:
        self.list.clear()
        self.steps.clear()

    def profile(self, running: int) -> StepProfile:
        """From what was noted. Raises ValueError if ``running`` requests never decoded together."""
        found: list[tuple[tuple[str, ...], list[float]]] = []
        for (first, count), (last, _) in itertools.pairwise(self.steps):
            if count == running:
                marks = self.list[first : last + 1]
                parts = tuple(part for _, part in marks[:-1])
                found.append((parts, [b[0] - a[0] for a, b in itertools.pairwise(marks)]))
        if not found:
            raise ValueError(f"{running} requests never ran together: raise max_num_seqs or the KV pool")
        usual = Counter(parts for parts, _ in found).most_common(1)[0][0]
        spans = list(zip(*(times for parts, times in found if parts == usual)))
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, times in zip(usual, spans):
            seconds[part] += sorted(times)[len(times) // 4]
        return StepProfile(running, len(spans[0]), {part: 1000 * value for part, value in seconds.items()})


class _MarkedLibrary:
    """A ctypes library whose functions are marked."""

    def __init__(self, library: Any, marks: Marks) -> None:
        self._library, self._marks = library, marks

    def __getattr__(self, name: str) -> Any:
        marked = self._marks.wrap("C code", getattr(self._library, name))
        setattr(self, name, marked)  # found directly from now on
        return marked


def profile_steps(
    model: str, running: Sequence[int], steps: int = 50, context: int = 128, **options: Any
) -> list[StepProfile]:
    """Profile about ``steps`` decode steps of each number of ``running`` requests, contexts from ``context`` tokens on.

    options: fields of ``EngineConfig``. Raises ValueError for a number of steps or requests that cannot be measured.
    """
    if steps < 4 or any(n < 1 for n in running):
        raise ValueError("steps must be at least 4 and running requests at least 1")
    marks = Marks()
    with _marked_engine(model, options, marks) as engine:
        return [_profile(engine, marks, count, steps, context) for count in running]


def _marked_engine(model: str, options: dict[str, Any], marks: Marks) -> Any:
    """An engine put together as ``build_engine`` does, with marks around its parts."""
    import torch

    from paged_backend.cache.manager import CacheManager
    from paged_backend.config import EngineConfig
    from paged_backend.engine.core import EngineCore
    from paged_backend.engine.engine import Engine
    from paged_backend.engine.factory import kernels_for, pool_blocks, sliding_window
    from paged_backend.engine.scheduler import Scheduler
    from paged_backend.models.loading import load_model
    from paged_backend.runner.model_runner import ModelRunner
    from paged_backend.text.tokenizer import load_tokenizer

    config = EngineConfig.from_options(model, **options)
    if config.through_triton:
        raise ValueError(
            "step times calls as the host sees them, which on a GPU return at once: use python -m benchmarks device"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    kernels: Any = kernels_for(config)
    if hasattr(kernels, "_lib"):
        kernels._lib = _MarkedLibrary(kernels._lib, marks)
    loaded = load_model(config, kernels)
    for name in _OPERATIONS:
        setattr(kernels, name, marks.wrap("kernel calls", getattr(kernels, name)))
    size, window = config.block_size, sliding_window(loaded.spec)
    kv_dtype = config.stored_kv_dtype
    block_bytes = ModelRunner.block_bytes(loaded.spec, size, kv_dtype)
    blocks = config.num_blocks or pool_blocks(config, loaded.spec, loaded.max_model_len, block_bytes)
    runner: Any = ModelRunner(loaded.decoder, kernels, blocks, size, kv_dtype)
    cache = CacheManager(blocks, size, window, config.enable_prefix_caching)
    scheduler: Any = Scheduler(
        cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.token_budget
    )
    core: Any = EngineCore(runner, cache, scheduler, loaded.max_model_len)
    scheduler.schedule = marks.wrap("schedule", scheduler.schedule)
    core._launch = marks.wrap("build work", core._launch)
    runner.model.forward = marks.wrap("forward", runner.model.forward)
    runner.sampler.sample = marks.wrap("sampler", runner.sampler.sample)
    runner.run = marks.wrap("build batch", runner.run)
    core.step = marks.wrap_step(core)
    return Engine(core, load_tokenizer(loaded.tokenizer_source, loaded.checkpoint), config)


def _profile(engine: Any, marks: Marks, running: int, steps: int, context: int) -> StepProfile:
    from paged_backend.sampling_params import SamplingParams

    rng = random.Random(running)
    vocab = engine.tokenizer.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(context)]} for _ in range(running)]
    # the first requests begin to decode while the last ones are still prefilled
    spare = -(-running * context // engine.config.token_budget) + 2
    params = SamplingParams(temperature=0, max_tokens=steps + spare, ignore_eos=True)
    engine.call(marks.clear)
    for handle in engine.submit_many(prompts, [params] * running):
        handle.result()
    return engine.call(lambda: marks.profile(running))
