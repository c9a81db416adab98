"""What the library says through ``logging`` and ``warnings``, as plain lines: for the programs of this package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """Within, ``tell`` gets what this package logs from WARNING on, and its RuntimeWarnings, each as one text."""
    log, handler = logging.getLogger("paged_backend"), _Handler(tell)
    log.addHandler(handler)
    before = tell_warnings(tell)
    try:
        yield
    finally:
        warnings.showwarning = before
        log.removeHandler(handler)


def tell_warnings(tell: Callable[[str], None]) -> Any:
    """RuntimeWarnings, which is what this package warns with, go to ``tell`` without the line of source code that
    Python shows; others stay as they are. Returns the ``warnings.showwarning`` that was in force."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], filename: str, *rest: Any, **more: Any) -> None:
        if issubclass(category, RuntimeWarning) and "paged_backend" in filename:
            tell(str(message))
        else:
            before(message, category, filename, *rest, **more)

    warnings.showwarning = show
    return before


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(self.format(record))
        except Exception:
            self.handleError(record)
