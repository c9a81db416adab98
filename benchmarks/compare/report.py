"""Rows as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.measures import Benchmark, Row
from paged_backend.cli.tables import aligned
from paged_backend.errors import PagedBackendError
from paged_backend.machine import cpu_name

_OURS, _PEER, _FAILED = "#2b6cb0", "#a0aec0", "#c53030"


def table(benchmark: Benchmark, rows: Sequence[Row], baseline: str | None) -> str:
    """Plain text: one line per contender, failures with their reason below."""
    columns = [c for c in benchmark.columns if any(c.key in row.values for row in rows)]
    lines = [["", *(c.title for c in columns), "min..max", "ratio", "cpu ratio", "1st token agrees"]]
    form = next(c.form for c in benchmark.columns if c.key == benchmark.key)
    for row in rows:
        if row.error is not None:
            lines.append([row.label, "failed", *[""] * (len(columns) + 3)])
            continue
        cells = [c.form.format(row.values[c.key]) if c.key in row.values else "-" for c in columns]
        spread = "..".join(form.format(value) for value in row.spread)
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else "-"
        agreement = f"{row.agreement:.0%}" if row.agreement is not None else "-"
        label = f"{row.label} ({row.note})" if row.note else row.label
        cpu_ratio = f"{row.cpu_ratio:.2f}" if row.cpu_ratio is not None else "-"
        lines.append([label, *cells, spread, ratio, cpu_ratio, agreement])
    text = [aligned(lines)]
    failed = [f"{row.label}: {row.error}" for row in rows if row.error is not None]
    if baseline is not None:
        text.append(f"ratio: to {baseline}, above 1 is better")
    return "\n".join([*text, *failed])


def as_json(title: str, rows: Sequence[Row], baseline: str | None, settings: Mapping[str, Any]) -> str:
    """The figures of every run with what is needed to repeat them."""
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    found = {
        "title": title,
        "baseline": baseline,
        "settings": dict(settings),
        "machine": machine,
        "rows": [row.as_dict() for row in rows],
    }
    return json.dumps(found, indent=1)


def plot(benchmark: Benchmark, rows: Sequence[Row], path: Path, title: str) -> None:
    """Horizontal bars, one panel per figure worth a picture; its suffix chooses the format. Needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PagedBackendError(
            "drawing needs matplotlib: pip install matplotlib (or the package's [bench] extra)"
        ) from error

    columns = [c for c in benchmark.columns if c.plot and any(c.key in row.values for row in rows)]
    if not columns:
        raise PagedBackendError("nothing to draw: every contender failed")
    key = benchmark.key
    best = -1 if benchmark.higher else 1
    order = sorted(rows, key=lambda r: (r.error is not None, best * r.values.get(key, 0.0)))
    figure = Figure(figsize=(4.2 + 3.6 * len(columns), 1.3 + 0.36 * len(order)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    places = list(range(len(order)))[::-1]
    for axes, column in zip(panels, columns):
        values = [row.values.get(column.key, 0.0) for row in order]
        axes.barh(places, values, 0.68, color=[_OURS if row.ours else _PEER for row in order])
        room = max(values) or 1.0
        for place, row, value in zip(places, order, values):
            if row.error is not None or column.key not in row.values:
                axes.text(
                    0.01 * room,
                    place,
                    "failed" if row.error else "not given",
                    va="center",
                    color=_FAILED,
                    fontsize=9,
                )
                continue
            end = value
            if column.key == key and len(row.runs) > 1:
                low, high = row.spread
                axes.plot([low, high], [place, place], color="#1a202c", linewidth=1.4, solid_capstyle="butt")
                end = max(value, high)
            axes.text(end + 0.015 * room, place, column.form.format(value), va="center", fontsize=9)
        axes.set_xlim(
            0, 1.16 * max(room, *(row.spread[1] if column.key == key else 0.0 for row in order), 0.0)
        )
        arrow = "higher" if (column.key == key and benchmark.higher) else "lower"
        axes.set_title(f"{column.title} ({arrow} is better)", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    labels = [f"{row.label}\n({row.note})" if row.note else row.label for row in order]
    panels[0].set_yticks(places, labels)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=140)
