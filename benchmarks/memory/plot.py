"""The memory benchmark as a picture: what the pool held, and how many requests ran at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_backend.bench.memory import CATEGORIES, MemoryRun
from paged_backend.errors import PagedBackendError

_COLORS = {
    "tokens": "#2b6cb0",
    "reserved": "#90cdf4",
    "internal": "#e53e3e",
    "external": "#f6ad55",
    "unallocated": "#e2e8f0",
}
_LABELS = {
    "tokens": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "unallocated": "unallocated",
}
_LINES = ("#2b6cb0", "#e53e3e", "#dd6b20", "#38a169", "#805ad5")


def plot_memory(runs: Sequence[MemoryRun], path: Path, title: str) -> None:
    """Write a picture with two panels to ``path`` (its suffix chooses the format). Needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PagedBackendError(
            "drawing needs matplotlib: pip install matplotlib (or the package's [bench] extra)"
        ) from error

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    bars, lines = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_bars(bars, runs)
    _draw_lines(lines, runs)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=140)


def _draw_bars(axes: Any, runs: Sequence[MemoryRun]) -> None:
    places = range(len(runs))
    bottom = [0.0] * len(runs)
    for name in CATEGORIES:
        heights = [100 * run.shares()[name] for run in runs]
        axes.bar(places, heights, 0.62, bottom=bottom, color=_COLORS[name], label=_LABELS[name])
        for place, low, height in zip(places, bottom, heights):
            if height >= 4:  # a label needs that much room
                ink = "white" if name in ("tokens", "internal") else "black"
                axes.text(
                    place, low + height / 2, f"{height:.1f}", ha="center", va="center", color=ink, fontsize=9
                )
        bottom = [low + height for low, height in zip(bottom, heights)]
    axes.set_xticks(list(places), [run.name for run in runs])
    axes.set_ylabel("share of the KV pool, %")
    axes.set_ylim(0, 100)
    axes.set_title("KV memory while requests wait", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=8, frameon=False)


def _draw_lines(axes: Any, runs: Sequence[MemoryRun]) -> None:
    for run, color in zip(runs, _LINES):
        steps, counts = _thin([s.running for s in run.samples])
        label = f"{run.name} (mean {run.mean_running:.1f})"
        axes.plot(steps, counts, color=color, linewidth=1.3, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("requests running at once")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Batch size; a line ends when all requests are done", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", fontsize=9, frameon=False)


def _thin(values: Sequence[int], most: int = 400) -> tuple[list[float], list[float]]:
    """At most ``most`` points, each the mean of equally many steps."""
    width = -(-len(values) // most)
    groups = [values[i : i + width] for i in range(0, len(values), width)]
    return [i * width + len(g) / 2 for i, g in enumerate(groups)], [sum(g) / len(g) for g in groups]
