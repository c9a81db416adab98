"""What the device benchmark has found so far, told line by line: a time limit may come at any moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


def _silent(_: str) -> None:
    pass


@dataclass(slots=True)
class Report:
    """tell: is given every line at once.

    device: the card's name. rows: (what, value, unit). checks_failed: names. notes: what was left out, and why.
    errors: what went wrong outside the checks. bandwidth: of a copy, bytes read and written per second; peak: of a
    large bf16 product, FLOP/s; 0 while not known.
    """

    device: str
    tell: Callable[[str], None] = field(default=_silent, repr=False)
    rows: list[tuple[str, float, str]] = field(default_factory=list)
    checks_passed: int = 0
    checks_failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    bandwidth: float = 0.0
    peak: float = 0.0

    def add(self, what: str, value: float, unit: str) -> None:
        self.rows.append((what, value, unit))
        self.tell(f"{what:<58} {value:>10.4g}  {unit}")

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.tell(text)

    def fail(self, text: str) -> None:
        self.errors.append(text)
        self.tell(f"ERROR  {text}")

    @property
    def failed(self) -> bool:
        """Whether a check or anything else went wrong."""
        return bool(self.checks_failed or self.errors)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "device": self.device,
            "torch": torch.__version__,
            "checks_passed": self.checks_passed,
            "checks_failed": self.checks_failed,
            "figures": [{"what": w, "value": v, "unit": u} for w, v, u in self.rows],
            "notes": self.notes,
            "errors": self.errors,
        }


def still_works() -> bool:
    """Whether the GPU answers. After some errors (an illegal address, say) it never does again in this process."""
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def one_line(error: Exception) -> str:
    """Its type and the beginning of its message, which of a compiler may be pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
