"""``python -m benchmarks device``: on a machine with a GPU, whether the kernels are right and how fast they are.

What the card can do first, as the rest is given as shares of it; then kernels against float64, attention alone, and the
whole engine: a model of Llama-3 8B's shape with random weights, and the demo model. A stage begins only if its time is
left, and what it finds is told as it goes, so that whoever stops this early knows all that was found by then.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.device.attention import measure_attention, measure_ceilings
from benchmarks.device.checks import check_all
from benchmarks.device.engine import measure_demo, measure_engine
from benchmarks.device.report import Report, one_line, still_works


@dataclass(frozen=True, slots=True)
class Stage:
    """run: (report, deadline of ``time.monotonic()``). least: seconds below which it is not begun.

    share: of the time that is left, after which it is to begin nothing more.
    """

    name: str
    run: Callable[[Report, float], None]
    least: float
    share: float = 1.0


STAGES = (
    Stage("copy and product", lambda report, deadline: measure_ceilings(report), 10),
    Stage("kernels against float64", check_all, 20, 0.35),
    Stage("attention", measure_attention, 30, 0.4),
    Stage("Llama-3 8B shape, random weights, bfloat16: the second of two runs each", measure_engine, 60, 0.8),
    Stage("demo model, bfloat16: the second of two runs each", measure_demo, 30),
)


def run_device_bench(seconds: float, tell: Callable[[str], None], save: Callable[[Report], None]) -> Report:
    """Everything, on the first GPU, which must be there, in at most about ``seconds``.

    tell: gets every line as soon as it is known. save: is called after every stage.
    """
    report = Report(torch.cuda.get_device_name(), tell)
    tell(f"{report.device}, torch {torch.__version__}")
    run_stages(report, STAGES, time.monotonic() + seconds, save)
    return report


def run_stages(
    report: Report, stages: Sequence[Stage], deadline: float, save: Callable[[Report], None]
) -> None:
    """One after another. A stage that raises is a line of the report, and the last one if the GPU is lost with it."""
    for stage in stages:
        now = time.monotonic()
        left = deadline - now
        if left < stage.least:
            report.note(f"{stage.name}: left out, the time was used up")
            continue
        report.tell(f"\n{stage.name} ({left:.0f} s left)")
        try:
            stage.run(report, now + stage.share * left)
        except Exception as error:
            report.fail(f"{stage.name}: {one_line(error)}")
            traceback.print_exc()
        works = still_works()
        if not works:
            report.fail(f"the GPU does not answer after {stage.name!r}: nothing more was run")
        save(report)
        if not works:
            return
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
    save(report)
