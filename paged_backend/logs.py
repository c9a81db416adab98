"""The server's log: one line per record on stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

from paged_backend.notices import tell_warnings


def set_up_logging(log_format: str) -> None:
    """Log this package, its warnings, and what goes wrong in uvicorn. log_format: ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormat(log_format == "json"))
    for name, level in (("paged_backend", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.handlers = [handler]
        log.propagate = False
    tell_warnings(logging.getLogger("paged_backend").warning)


class LogFormat(logging.Formatter):
    """One line per record, as text or as a JSON object; what a record has in ``fields`` is added to it."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {
                "time": stamp,
                "level": record.levelname.lower(),
                "message": record.getMessage(),
                **fields,
            }
            if trace is not None:
                line["traceback"] = trace
            return json.dumps(line)
        skip = ("event", "method", "route", "status")
        rest = "".join(f" {name}={value}" for name, value in fields.items() if name not in skip)
        text = f"{stamp} {record.levelname} {record.getMessage()}{rest}"
        return text if trace is None else f"{text}\n{trace}"
