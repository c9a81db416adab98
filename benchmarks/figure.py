"""The picture of the README, drawn from the table in docs/benchmarks.md, so that they cannot differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import typer

from paged_backend.errors import PagedBackendError

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "throughput.svg"
TITLE = "64 chats at once, SmolLM2-135M, one core of a Xeon with AMX: output tokens per second"

_ROW = re.compile(r"\| (?P<engine>[^|]+) \| \**(?P<median>\d+)\** \((?P<least>\d+) to (?P<most>\d+)\) \|")
_OURS, _PEER = "#2b6cb0", "#a0aec0"


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of the table: tokens per second."""

    engine: str
    median: int
    least: int
    most: int

    @property
    def ours(self) -> bool:
        return self.engine.startswith("ours")


def read_table(text: str, heading: str = "### Throughput") -> list[Bar]:
    """The rows of the first table below ``heading``, in order. Raises PagedBackendError if there are none."""
    part = text.partition(f"{heading}\n")[2].partition("\n### ")[0]
    found = [
        Bar(_short(m["engine"]), *map(int, m.group("median", "least", "most"))) for m in _ROW.finditer(part)
    ]
    if not found:
        raise PagedBackendError(f"there is no table of throughputs below {heading!r}")
    return found


def _short(engine: str) -> str:
    """The name without what is said in parentheses."""
    return re.sub(r" \([^)]*\)", "", engine).strip()


def draw(bars: list[Bar], path: Path) -> None:
    """A bar for each, with a line from the least to the most. Needs matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 0.4 + 0.3 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [b.median for b in bars], 0.66, color=[_OURS if b.ours else _PEER for b in bars])
    for place, bar in zip(places, bars):
        axes.plot([bar.least, bar.most], [place, place], color="#1a202c", linewidth=1.2)
        axes.text(bar.most + 5, place, str(bar.median), va="center", fontsize=9)
    axes.set_yticks(places, [b.engine for b in bars], fontsize=9)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlim(0, 1.08 * max(b.most for b in bars))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(TITLE, fontsize=10)
    # text stays text, and the same table gives the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "throughput"}):
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def register(app: typer.Typer) -> None:
    """Add the command ``figure`` to ``app``."""
    app.command("figure")(figure)


def figure() -> None:
    """Draw docs/throughput.svg from the table of throughputs in docs/benchmarks.md."""
    draw(read_table(TABLE.read_text(encoding="utf-8")), PICTURE)
