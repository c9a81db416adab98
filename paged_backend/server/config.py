"""ServerConfig: everything that shapes the HTTP side, validated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of one server; those of its engine are an ``EngineConfig``.

    host, port: where to listen; only this machine by default. Port 0 takes a free one.
    served_model_names: names clients may ask for, the first is the one reported; empty: the engine's ``model``.
    api_keys: any of these opens every route but ``/health``; empty: no key is asked for.
    cors_origins: origins whose pages may call the API; ``*`` for all, empty for none.
    in_process: run the engine in the server's process, without the supervisor that restarts it.
    max_waiting: requests that may wait for a seat in the batch before new ones get a 429.
    max_body_bytes: longest request body. request_timeout: seconds until a request is given up, None for never.
    slow_reader_timeout: seconds a client may leave a stream unread before it is dropped.
    drain_timeout: seconds that running requests get to finish at shutdown.
    stall_timeout: seconds without a finished step, while there is work, until the engine is restarted.
    max_restarts: failed starts in a row until the server gives up.
    max_stored_responses, max_stored_bytes: how much of the Responses API is kept in memory; 0 keeps nothing.
    trust_request_chat_template: allow ``chat_template`` in requests; a template is a program.
    chat_template: a Jinja template, or the name of one of the model's, that replaces its default.
    log_format: ``text`` or ``json``. log_prompts: write prompts and tracebacks to the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    in_process: bool = False
    max_waiting: int = 512
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    slow_reader_timeout: float = 60.0
    drain_timeout: float = 30.0
    stall_timeout: float = 120.0
    max_restarts: int = 5
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 << 20
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    log_format: str = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "cors_origins"):
            value = getattr(self, name)
            items = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(item, str) and item for item in items):
                raise ValueError(f"{name} must be non-empty strings")  # the values may be secrets
            object.__setattr__(self, name, items)
        for key in self.api_keys:
            if not key.isascii() or key != key.strip():
                raise ValueError(
                    "api_keys must be ASCII without spaces around them: they travel in an HTTP header"
                )
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"host must be an address or a host name, got {self.host!r}")
        _whole("port", self.port, 0, 65535)
        _whole("max_waiting", self.max_waiting, 0)
        _whole("max_body_bytes", self.max_body_bytes, 1024)
        for name in ("max_restarts", "max_stored_responses", "max_stored_bytes"):
            _whole(name, getattr(self, name), 0)
        for name in ("request_timeout", "slow_reader_timeout", "drain_timeout", "stall_timeout"):
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
                raise ValueError(f"{name} must be a number of seconds > 0, got {value!r}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be 'text' or 'json', got {self.log_format!r}")


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not good or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
