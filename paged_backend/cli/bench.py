"""``paged-backend bench``: how fast a model is on this machine, what its KV memory wastes, how well it predicts a text.

Our engine alone; comparisons with others are in the repository's ``benchmarks/``.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.common import complain, open_engine, orderly
from paged_backend.cli.flags import checked_config, with_flags
from paged_backend.cli.help import HeadedCommand
from paged_backend.cli.tables import aligned

if TYPE_CHECKING:
    from paged_backend.bench.memory import MemoryRun
    from paged_backend.bench.workloads import Workload

app = typer.Typer(
    help="How fast a model is on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id or 'demo'.")]
Repeats = Annotated[int, typer.Option(help="How often all of it is measured; medians are given.")]
Seed = Annotated[int, typer.Option(help="Of the lengths and the prompts.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]

PAPER_POOL = 15728
"""Slots of the PagedAttention paper's main experiment: 12 GB of KV memory at OPT-13B's 800 KB per token."""


@app.command("throughput", cls=HeadedCommand)
@with_flags("engine")
def throughput(
    model: Model = "demo",
    requests: Annotated[int, typer.Option(help="Requests, all there at the start.")] = 64,
    repeats: Repeats = 3,
    seed: Seed = 0,
    json: Json = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Output tokens per second for many requests of chat-like lengths at once (mean 144 tokens in, 118 out)."""
    from paged_backend.bench import workloads

    rows = {
        "tokens_per_s": ("output tokens per second", "{:.1f}"),
        "all_tokens_per_s": ("with the prompts' tokens", "{:.1f}"),
        "first_token_s": ("seconds to the first token", "{:.2f}"),
        "seconds": ("seconds for all", "{:.2f}"),
    }
    _measure(
        "throughput",
        model,
        engine,
        lambda vocab, context: workloads.throughput(vocab, requests, seed, context),
        rows,
        repeats,
        json,
    )


@app.command("latency", cls=HeadedCommand)
@with_flags("engine")
def latency(
    model: Model = "demo",
    requests: Annotated[int, typer.Option(help="Requests, one after another.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    repeats: Repeats = 3,
    seed: Seed = 0,
    json: Json = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Milliseconds to the first token and for each further one, one request at a time."""
    from paged_backend.bench import workloads

    rows = {
        "first_token_ms": ("ms to the first token", "{:.1f}"),
        "ms_per_token": ("ms per token after it", "{:.2f}"),
        "tokens_per_s": ("tokens per second", "{:.1f}"),
    }
    _measure(
        "latency",
        model,
        engine,
        lambda vocab, _: workloads.latency(vocab, requests, prompt, output, seed),
        rows,
        repeats,
        json,
    )


def _measure(
    name: str,
    model: str,
    options: Mapping[str, Any],
    make: Callable[[int, int], Workload],
    rows: Mapping[str, tuple[str, str]],
    repeats: int,
    json: Path | None,
) -> None:
    """Run ``speed.NAME`` and print its figures.

    make: (vocabulary, context) -> the workload. rows: title and form of each figure.
    """
    if repeats < 1:
        raise typer.BadParameter(f"--repeats must be at least 1, got {repeats}")
    checked_config(model, options)
    from paged_backend.bench import speed
    from paged_backend.errors import PagedBackendError
    from paged_backend.machine import cpu_name

    runs: list[dict[str, float]] = []
    with open_engine(model, {"enable_prefix_caching": False, **options}) as engine:
        try:
            load = make(engine.vocab_size, engine.max_model_len)
            title = (
                f"{model}: {len(load.requests)} requests, {load.prompt_tokens} tokens in, {load.output_tokens} out, "
                f"{'one after another' if load.one_by_one else 'all at once'}; {cpu_name()}"
            )
            typer.echo(title, err=True)
            for turn in range(repeats):
                runs.append(getattr(speed, name)(engine, load))
                typer.echo(f"  run {turn + 1}: {runs[-1]['tokens_per_s']:.1f} tokens/s", err=True)
        except (PagedBackendError, ValueError) as error:
            raise _failed(error) from error
    table = [["", "median", "least", "most"]]
    for key, (text, form) in rows.items():
        values = [run[key] for run in runs]
        table.append([text, *(form.format(value) for value in (median(values), min(values), max(values)))])
    typer.echo(f"{title}\n\n{aligned(table)}")
    _write(json, {"title": title, "engine": dict(options), "runs": runs})


@app.command("memory", cls=HeadedCommand)
def memory(
    trace: Annotated[
        str, typer.Option(help="sharegpt, alpaca, or a JSONL file with prompt_tokens and output_tokens.")
    ] = "sharegpt",
    requests: Annotated[int, typer.Option(help="Requests in a preset's trace.")] = 256,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per step (Poisson). Default: all are there at the start."),
    ] = None,
    seed: Seed = 0,
    pool_tokens: Annotated[int, typer.Option(help="KV pool in tokens.")] = PAPER_POOL,
    context: Annotated[int, typer.Option(help="Longest prompt + output.")] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 512,
    json: Json = None,
) -> None:
    """How full KV memory is, and how little of it is wasted, under a trace of lengths; no model is run."""
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    checked_config("none", sizes)
    from paged_backend.bench.memory import run_paged
    from paged_backend.bench.traces import PRESETS, make_trace, mean_lengths, read_trace
    from paged_backend.errors import PagedBackendError

    try:
        if trace in PRESETS:
            made = make_trace(trace, requests, seed, rate, context)
        else:
            made = read_trace(Path(trace), seed, rate, context)
        run = run_paged(made, pool_tokens=pool_tokens, context=context, **sizes)
    except (PagedBackendError, ValueError, OSError) as error:
        raise _failed(error) from error
    mean_in, mean_out = mean_lengths(made)
    title = (
        f"{len(made)} requests ({trace}, mean {mean_in:.0f} in / {mean_out:.0f} out), "
        f"{pool_tokens} KV slots, block size {block_size}"
    )
    typer.echo(f"{title}\n\n{memory_table([run])}")
    _write(json, {"title": title, **run.summary()})


def memory_table(runs: Sequence[MemoryRun]) -> str:
    """A row for each run, and what the columns mean."""
    from paged_backend.bench.memory import CATEGORIES

    rows = [["", *CATEGORIES, "waste", "running", "peak", "steps", "preempted", "computed"]]
    for run in runs:
        shares = run.shares()
        rows.append(
            [
                run.name,
                *(f"{shares[name]:.1%}" for name in CATEGORIES),
                f"{run.waste:.1%}",
                f"{run.mean_running:.1f}",
                str(run.peak_running),
                str(len(run.samples)),
                str(run.preemptions),
                str(run.computed_tokens),
            ]
        )
    notes = [
        "",
        "tokens .. unallocated: average share of the pool while requests wait (they add up to 100 %).",
        "waste: share of the allocated slots that hold no token. running, peak: requests at once. computed: tokens",
        "run through the model, recomputation after preemption included.",
    ]
    if not runs[0].saturated:
        notes.insert(
            1, "Nobody ever waited: averages are over all steps. Raise --rate or lower --pool-tokens."
        )
    return "\n".join([aligned(rows), *notes])


@app.command("perplexity", cls=HeadedCommand)
@with_flags("engine")
def perplexity(
    model: Model = "demo",
    text: Annotated[
        Path | None, typer.Option(help="A text file. Default: the language reference Python carries.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = 20000,
    window: Annotated[int, typer.Option(help="Tokens of a window; each is scored by itself.")] = 1024,
    json: Json = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Perplexity of a text: run it with each --quantization to see what a format costs in quality."""
    checked_config(model, engine)
    from paged_backend.bench.perplexity import default_text
    from paged_backend.bench.perplexity import perplexity as measure
    from paged_backend.errors import PagedBackendError

    try:
        prose = text.read_text(encoding="utf-8") if text is not None else default_text()
    except (OSError, ValueError) as error:
        raise _failed(error) from error
    with open_engine(model, {"enable_prefix_caching": False, **engine}) as opened:
        try:
            value, count = measure(opened, prose, window, tokens)
        except (PagedBackendError, ValueError) as error:
            raise _failed(error) from error
    typer.echo(f"perplexity {value:.4f} over {count} tokens")
    _write(json, {"model": model, "engine": engine, "perplexity": value, "tokens": count})


def _failed(error: Exception) -> typer.Exit:
    complain(str(error))
    return typer.Exit(1)


def _write(path: Path | None, data: Mapping[str, Any]) -> None:
    if path is not None:
        from paged_backend.machine import cpu_name

        path.write_text(json_module.dumps({"cpu": cpu_name(), **data}, indent=1), encoding="utf-8")


for command in app.registered_commands:
    if command.callback is not None:
        command.callback = orderly(command.callback)
