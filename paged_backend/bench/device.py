"""``paged-backend bench device``: on a machine with a GPU, whether the kernels are right and how fast they are.

Kernels against float64 first, then attention by itself as a share of what the card can do (measured too, not taken from
a data sheet), then the whole engine: a model of Llama-3 8B's shape with random weights, and the demo model. Every stage
has a share of the time; one that finds none left says so instead of running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paged_backend.bench.device_checks import check_kernels
from paged_backend.config import EngineConfig
from paged_backend.kernels.base import AttentionInputs
from paged_backend.kernels.triton.backend import TritonKernels

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(slots=True)
class Report:
    """device: the card's name. rows: (what, value, unit). checks_failed: names. notes: what was left out, and why."""

    device: str
    rows: list[tuple[str, float, str]] = field(default_factory=list)
    checks_passed: int = 0
    checks_failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str) -> None:
        self.rows.append((what, value, unit))

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "torch": torch.__version__,
            "checks_passed": self.checks_passed,
            "checks_failed": self.checks_failed,
            "figures": [{"what": w, "value": v, "unit": u} for w, v, u in self.rows],
            "notes": self.notes,
        }


def run_device_bench(seconds: float) -> Report:
    """Everything, on the first GPU, which must be there, in at most about ``seconds``."""
    deadline = time.monotonic() + seconds
    report = Report(torch.cuda.get_device_name())
    stages: tuple[tuple[str, float, Callable[[Report], None]], ...] = (
        ("kernels against float64", 0, check_all),
        ("attention", 60, measure_attention),
        ("Llama-3 8B shape, random weights, bfloat16", 120, partial(measure_engine, config=LLAMA_8B)),
        ("demo model, bfloat16", 60, measure_demo),
    )
    for name, least, stage in stages:
        if deadline - time.monotonic() < least:
            report.notes.append(f"{name}: left out, the time was used up")
            continue
        try:
            stage(report)
        except Exception as error:  # a stage that cannot run is a line of the report
            report.notes.append(f"{name}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    return report


def check_all(report: Report) -> None:
    """Every kernel in every dtype against float64."""
    for dtype in ("bfloat16", "float16", "float32"):
        for check in check_kernels(TritonKernels("cuda", dtype)):
            if check.passed:
                report.checks_passed += 1
            else:
                report.checks_failed.append(f"{check.name}: {check.error:.2e} > {check.bound:.2e}")


def measure_attention(report: Report) -> None:
    """Decode as a share of copy bandwidth, prefill as a share of the speed of a large bf16 product."""
    bandwidth = copy_bandwidth()
    peak = matmul_speed()
    report.add("copy bandwidth", bandwidth / 1e12, "TB/s")
    report.add("bf16 matmul, 8192 cubed", peak / 1e12, "TFLOP/s")
    kernels = TritonKernels("cuda", "bfloat16")
    for batch, context in ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (64, 8192)):
        seconds = time_attention(kernels, batch, 1, context)
        share = batch * context * 2 * 8 * 128 * 2 / seconds / bandwidth
        report.add(f"decode attention, {batch} x {context}", 100 * share, "% of copy bandwidth")
    for batch, context in ((1, 2048), (1, 8192), (4, 2048)):
        seconds = time_attention(kernels, batch, context, context)
        share = batch * 4 * 32 * 128 * context * (context + 1) / 2 / seconds / peak
        report.add(f"prefill attention, {batch} x {context}", 100 * share, "% of bf16 matmul")


def time_attention(kernels: TritonKernels, batch: int, queries: int, context: int) -> float:
    """Seconds of one layer's attention (32 heads, 8 key heads, head size 128), blocks in random order."""
    device = kernels.device
    per_sequence = -(-context // 16)
    cache = kernels.empty_cache(1, batch * per_sequence + 1, 8, 128, 16, kernels.dtype)[0]
    cache.key.normal_(), cache.value.normal_()
    table = (
        (torch.randperm(batch * per_sequence, device=device) + 1).to(torch.int32).view(batch, per_sequence)
    )
    inputs = AttentionInputs(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        torch.full((batch,), context, dtype=torch.int32, device=device),
        table,
        torch.zeros(batch * queries, dtype=torch.int64, device=device),
    )
    q = torch.randn(batch * queries, 32, 128, dtype=kernels.dtype, device=device)
    plan = kernels.plan(inputs)
    return timed(lambda: kernels.paged_attention(plan, q, cache, 128**-0.5), device)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy of ``size`` bytes on the device."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), source.device)


def matmul_speed(size: int = 8192) -> float:
    """FLOP/s of a square bf16 product."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b, a.device)


def timed(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of ``run`` on the device's own clock, after some runs that warm up. On a CPU, by the wall."""
    for _ in range(3):
        run()
    if device.type == "cpu":
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return median(seconds)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


# --- the whole engine ------------------------------------------------------------------------------------------------


def measure_engine(
    report: Report,
    config: Mapping[str, Any],
    batches: tuple[int, ...] = (1, 8, 64),
    prompt: int = 512,
    output: int = 128,
    **options: Any,
) -> None:
    """Throughput and latency of a model with random weights: ``prompt`` tokens in, ``output`` out, all at once."""
    from paged_backend.engine.factory import kernels_for, start_engine
    from paged_backend.models.loading import build_model

    settings = {"device": "cuda", "max_num_batched_tokens": 2048, **options}
    engine_config = EngineConfig("random", enable_prefix_caching=False, **settings)
    kernels = kernels_for(engine_config)
    model = build_model(engine_config, kernels, random_checkpoint(config, kernels.device), False)
    name = f"{config['num_hidden_layers']} layers of {config['hidden_size']}"
    with start_engine(engine_config, kernels, model, None) as engine:
        run_requests(engine, max(batches), prompt, 8)  # compiles kernels, captures graphs, grows the pool
        for batch in batches:
            report_run(report, f"{name}, {batch} at once", run_requests(engine, batch, prompt, output))


def measure_demo(report: Report) -> None:
    """The same for the demo model, with shorter texts."""
    from paged_backend.engine.registry import get_engine

    with get_engine("demo", device="cuda", enable_prefix_caching=False, share=False) as engine:
        run_requests(engine, 64, 128, 8)
        for batch in (1, 64):
            report_run(report, f"demo model, {batch} at once", run_requests(engine, batch, 128, 128))


def report_run(report: Report, name: str, run: tuple[float, float, float]) -> None:
    """Add what :func:`run_requests` measured."""
    for what, value, unit in zip(("output", "first token", "between tokens"), run, ("tok/s", "s", "ms")):
        report.add(f"{name}: {what}", value, unit)


def run_requests(engine: Any, batch: int, prompt: int, output: int) -> tuple[float, float, float]:
    """(output tokens per second, median seconds to the first token, median milliseconds between tokens)."""
    from paged_backend.sampling_params import SamplingParams

    generator = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    prompts = torch.randint(3, engine.vocab_size, (batch, prompt), generator=generator).tolist()
    start = time.monotonic()
    handles = engine.submit_many([{"prompt_token_ids": ids} for ids in prompts], [params] * batch)
    metrics = [handle.result().metrics for handle in handles]
    seconds = time.monotonic() - start
    first = median(m.first_token_time - m.arrival_time for m in metrics)
    between = median((m.last_token_time - m.first_token_time) / max(output - 1, 1) for m in metrics)
    return batch * output / seconds, first, 1e3 * between


def random_checkpoint(config: Mapping[str, Any], device: torch.device) -> Any:
    """A model of this config with random weights, made on ``device`` when they are asked for."""
    from paged_backend.models.architectures import spec_from_config
    from paged_backend.models.checkpoint import Checkpoint
    from paged_backend.models.tensors import expected_shapes

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)

    shapes = expected_shapes(spec_from_config(config))
    return Checkpoint(
        config=config,
        tensors={name: partial(make, shape) for name, shape in shapes.items()},
        shapes=shapes,
        generation_config={},
        path=Path("random weights"),
        tokenizer_source="random weights",
    )
