"""The command ``memory``: KV memory under one trace, ours and contiguous reservation."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.compare.commands import Plot
from paged_backend.cli.bench import PAPER_POOL, memory_table
from paged_backend.cli.common import complain
from paged_backend.cli.flags import checked_config, with_flags
from paged_backend.cli.help import HeadedCommand

if TYPE_CHECKING:
    from paged_backend.bench.memory import MemoryRun
    from paged_backend.bench.traces import TraceRequest


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("memory", cls=HeadedCommand)(memory)


@with_flags("engine")
def memory(
    model: Annotated[
        str | None,
        typer.Argument(help="Run our side on this model. Default: follow the lengths only, without a model."),
    ] = None,
    trace: Annotated[
        str, typer.Option(help="sharegpt, alpaca, or a JSONL file with prompt_tokens and output_tokens.")
    ] = "sharegpt",
    requests: Annotated[int, typer.Option(help="Requests in a preset's trace.")] = 256,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per step (Poisson). Default: all are there at the start."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 0,
    pool_tokens: Annotated[
        int, typer.Option(help="KV pool in tokens, the same for every allocator.")
    ] = PAPER_POOL,
    context: Annotated[int, typer.Option(help="Longest prompt + output; what 'max' reserves.")] = 2048,
    placement: Annotated[
        str, typer.Option(help="How contiguous allocators place: buddy (the paper's) or first-fit.")
    ] = "buddy",
    json: Annotated[Path | None, typer.Option(help="Write the figures, step by step, to this file.")] = None,
    plot: Plot = None,
    *,
    engine: dict[str, Any],
) -> None:
    """KV memory under one trace: ours, and contiguous reservation (max, power of two, oracle)."""
    for name in ("num_blocks", "kv_cache_memory", "max_model_len", "tokenizer", "enable_prefix_caching"):
        if name in engine:
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} has no place here: use --pool-tokens and --context"
            )
    checked_config(model or "none", engine)
    from benchmarks.memory.contiguous import PLACEMENTS, POLICIES, run_contiguous
    from benchmarks.memory.model_runner import open_model
    from paged_backend.bench.memory import run_paged
    from paged_backend.bench.traces import PRESETS, make_trace, mean_lengths, read_trace
    from paged_backend.config import EngineConfig
    from paged_backend.errors import PagedBackendError

    if placement not in PLACEMENTS:
        raise typer.BadParameter(f"--placement must be {' or '.join(PLACEMENTS)}, got {placement!r}")
    budget = {
        "max_num_seqs": engine.get("max_num_seqs", 256),
        "max_num_batched_tokens": engine.get("max_num_batched_tokens", 512),
    }
    block_size = engine.get("block_size", 16)
    try:
        if trace in PRESETS:
            requests_made = make_trace(trace, requests, seed, rate, context)
        else:
            requests_made = read_trace(Path(trace), seed, rate, context)
        extra: dict[str, Any] = {}
        if model is not None:
            num_blocks = pool_tokens // block_size + 1
            config = EngineConfig.from_options(model, num_blocks=num_blocks, max_model_len=context, **engine)
            runner, window = open_model(config, requests_made)
            extra = {"runner": runner, "window": window}
        runs = [
            run_paged(
                requests_made,
                pool_tokens=pool_tokens,
                block_size=block_size,
                context=context,
                **budget,
                **extra,
            )
        ]
        for policy in POLICIES:
            runs.append(
                run_contiguous(
                    requests_made,
                    policy,
                    pool_tokens=pool_tokens,
                    placement=placement,
                    context=context,
                    **budget,
                )
            )
        mean_in, mean_out = mean_lengths(requests_made)
        title = (
            f"{len(requests_made)} requests ({trace}, mean {mean_in:.0f} in / {mean_out:.0f} out), "
            f"{pool_tokens} KV slots, block size {block_size}, {placement} placement"
        )
        typer.echo(f"{title}\n\n{memory_table(runs)}")
        if json is not None:
            json.write_text(json_module.dumps(_as_data(title, requests_made, runs)), encoding="utf-8")
        if plot is not None:
            from benchmarks.memory.plot import plot_memory

            plot_memory(runs, plot, title)
    except (PagedBackendError, ValueError, OSError) as error:
        complain(str(error))
        raise typer.Exit(1) from error


def _as_data(title: str, trace: Sequence[TraceRequest], runs: Sequence[MemoryRun]) -> dict[str, Any]:
    from dataclasses import asdict

    samples = {run.name: [asdict(sample) for sample in run.samples] for run in runs}
    return {
        "title": title,
        "trace": [asdict(request) for request in trace],
        "runs": [{**run.summary(), "samples": samples[run.name]} for run in runs],
    }
