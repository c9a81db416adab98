"""The whole engine on a device: a model of Llama-3 8B's shape with random weights, and the demo model.

Whatever is reported was run twice, and the second run counts: in the first, kernels are compiled, graphs for the
numbers of rows that occur are captured, and the KV pool grows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.device.report import Report
from paged_backend.config import EngineConfig
from paged_backend.kernels.array import Array
from paged_backend.kernels.tensor import as_array

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
_BUDGET = 2048  # tokens of a step


@dataclass(frozen=True, slots=True)
class EngineRun:
    """rate: output tokens per second. first: median seconds to the first token. between: median seconds between tokens.

    step: median seconds of a step in which every request decodes, which is less than ``between`` where prompts of some
    requests are computed beside the tokens of others; None if there was no such step.
    """

    rate: float
    first: float
    between: float
    step: float | None


def measure_engine(
    report: Report,
    deadline: float = float("inf"),
    config: Mapping[str, Any] = LLAMA_8B,
    batches: tuple[int, ...] = (1, 8, 64),
    prompt: int = 512,
    output: int = 128,
    alone: int = 2048,
    **options: Any,
) -> None:
    """Throughput and latency of a model with random weights: ``prompt`` tokens in, ``output`` out, all at once.

    Decode steps are also given as a share of what reading weights and keys and values would take; the first token of a
    prompt of ``alone`` tokens as a share of a large product's speed; the last batch again with steps launched only when
    the one before is done. deadline: of ``time.monotonic()``, to begin no case after.
    """
    from paged_backend.engine.factory import kernels_for, start_engine
    from paged_backend.models.loading import build_model

    settings = {"device": "cuda", "max_num_batched_tokens": _BUDGET, **options}
    engine_config = EngineConfig("random", enable_prefix_caching=False, **settings)
    kernels = kernels_for(engine_config)
    model = build_model(engine_config, kernels, random_checkpoint(config, kernels.torch_device), False)
    name = f"{config['num_hidden_layers']} layers of {config['hidden_size']}"
    with start_engine(engine_config, kernels, model, None) as engine:
        for batch in batches:
            if time.monotonic() > deadline:
                report.note(f"{name}, {batch} at once: left out, the time was used up")
                continue
            run = second_run(engine, batch, prompt, output)
            report_run(report, f"{name}, {batch} at once", run)
            if run.step is not None and report.bandwidth:
                token = engine.stats().kv_block_bytes / engine_config.block_size
                read = weight_bytes(model.decoder) + batch * (prompt + output / 2) * token
                share = read / report.bandwidth / run.step
                report.add(f"{name}, {batch} at once: decode step", 100 * share, "% of the roofline")
        if time.monotonic() > deadline:
            report.note(f"{name}: first token alone and steps one by one left out, the time was used up")
            return
        first = second_run(engine, 1, alone, 1).first
        report.add(f"{name}, a prompt of {alone} alone: first token", 1e3 * first, "ms")
        if report.peak:
            share = prefill_work(model.decoder, alone) / first / report.peak
            report.add(f"{name}, a prompt of {alone} alone", 100 * share, "% of bf16 matmul")
        runner = engine._core.runner
        engine.call(partial(setattr, runner, "runs_ahead", False))
        run = second_run(engine, batches[-1], prompt, output)
        report_run(report, f"{name}, {batches[-1]} at once, not launched ahead", run)


def measure_demo(
    report: Report,
    deadline: float = float("inf"),
    batches: tuple[int, ...] = (1, 64),
    length: int = 128,
    **options: Any,
) -> None:
    """The same for the demo model, ``length`` tokens in and out."""
    from paged_backend.engine.registry import get_engine
    from paged_backend.errors import ModelLoadError

    settings = {"device": "cuda", "max_num_batched_tokens": _BUDGET, **options}
    try:
        opened = get_engine("demo", enable_prefix_caching=False, share=False, **settings)
    except (ModelLoadError, ModuleNotFoundError) as error:
        report.note(f"demo model: left out, {error}")
        return
    with opened as engine:
        for batch in batches:
            if time.monotonic() > deadline:
                report.note(f"demo model, {batch} at once: left out, the time was used up")
                continue
            report_run(report, f"demo model, {batch} at once", second_run(engine, batch, length, length))


def report_run(report: Report, name: str, run: EngineRun) -> None:
    """Add what was measured."""
    report.add(f"{name}: output", run.rate, "tok/s")
    report.add(f"{name}: first token", 1e3 * run.first, "ms")
    report.add(f"{name}: between tokens", 1e3 * run.between, "ms")
    if run.step is not None:
        report.add(f"{name}: decode step", 1e3 * run.step, "ms")


def second_run(engine: Any, batch: int, prompt: int, output: int) -> EngineRun:
    """Run the same requests twice; what the second run took."""
    run_requests(engine, batch, prompt, output)
    return run_requests(engine, batch, prompt, output)


def run_requests(engine: Any, batch: int, prompt: int, output: int) -> EngineRun:
    """``batch`` random prompts of ``prompt`` tokens, submitted at once, ``output`` tokens each."""
    from paged_backend.sampling_params import SamplingParams

    generator = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    prompts = torch.randint(3, engine.vocab_size, (batch, prompt), generator=generator).tolist()
    with steps_of(engine) as steps:
        start = time.monotonic()
        handles = engine.submit_many([{"prompt_token_ids": ids} for ids in prompts], [params] * batch)
        metrics = [handle.result().metrics for handle in handles]
        seconds = time.monotonic() - start
    # every request drew a token in the step before as well, so that in this one all of them decode
    decodes = [end - begin for (begin, a), (end, b) in pairwise(steps) if a == b == batch]
    return EngineRun(
        rate=batch * output / seconds,
        first=median(m.first_token_time - m.arrival_time for m in metrics),
        between=median((m.last_token_time - m.first_token_time) / max(output - 1, 1) for m in metrics),
        step=median(decodes) if decodes else None,
    )


@contextmanager
def steps_of(engine: Any) -> Iterator[list[tuple[float, int]]]:
    """A list that grows while the engine runs: when each step ended, and how many requests got a token in it."""
    core = engine._core
    step, steps = core.step, []

    def timed() -> Any:
        updates = step()
        steps.append((time.monotonic(), len(updates)))
        return updates

    core.step = timed
    try:
        yield steps
    finally:
        del core.step


def weight_bytes(decoder: Any) -> int:
    """Bytes of the weights that a decode step reads: of an embedding that is not the head too, some rows only."""
    tied = decoder.lm_head is decoder.embed_tokens
    return decoder.nbytes() - (0 if tied else decoder.embed_tokens.nbytes())


def prefill_work(decoder: Any, tokens: int) -> int:
    """FLOPs of a prompt and its last token's logits; behind the last layer's attention there is only that token."""
    spec, rest = decoder.spec, decoder.lm_head.in_features * decoder.lm_head.out_features
    per_token = 0
    for i, layer in enumerate(decoder.layers):
        qkv, *others = (
            w.in_features * w.out_features for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        per_token += qkv
        if i + 1 < len(decoder.layers):
            per_token += sum(others)
        else:
            rest += sum(others)
    attention = spec.num_layers * spec.num_heads * spec.head_dim * tokens * (tokens + 1)
    return 2 * (tokens * per_token + rest + attention)


def random_checkpoint(config: Mapping[str, Any], device: torch.device) -> Any:
    """A model of this config with random weights; made on ``device`` when asked for, and brought to the host."""
    from paged_backend.checkpoints.checkpoint import Checkpoint
    from paged_backend.models.architectures import spec_from_config
    from paged_backend.models.tensors import expected_shapes

    generator = torch.Generator(device).manual_seed(0)

    def make(shape: tuple[int, ...]) -> Array:
        return as_array(
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        )

    shapes = expected_shapes(spec_from_config(config))
    return Checkpoint(
        config=config,
        tensors={name: partial(make, shape) for name, shape in shapes.items()},
        shapes=shapes,
        generation_config={},
        path=Path("random weights"),
        tokenizer_source="random weights",
    )
