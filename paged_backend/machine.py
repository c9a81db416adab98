"""The machine that a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
