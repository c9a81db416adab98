"""Prometheus metrics: the names vLLM uses, behind ``paged_backend:``."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paged_backend.remote.client import EngineClient
from paged_backend.remote.job import RemoteRequest

PREFIX = "paged_backend:"
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
    1800,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_GAUGES = {
    "num_requests_running": ("num_running", "Sequences in the batch."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a place in the batch."),
    "kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks in use; 1 is all."),
    "kv_cache_waste_perc": ("kv_waste", "Share of the used KV memory that holds nothing."),
    "kv_cache_committed_bytes": (
        "kv_committed_bytes",
        "Memory of the KV blocks that were written and not given back.",
    ),
}
_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Sequences that had to give back blocks."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found there."),
    "iteration_tokens": ("scheduled_tokens", "Tokens computed, over all steps."),
    "num_steps": ("num_steps", "Steps of the engine."),
    "num_failed_steps": ("num_failed_steps", "Steps that had to be run again request by request."),
}


class Metrics:
    """One server's; nothing is global. Counters go on when the engine is restarted."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._gauges = {stat: self._make(Gauge, name, text) for name, (stat, text) in _GAUGES.items()}
        self._counters = {stat: self._make(Counter, name, text) for name, (stat, text) in _COUNTERS.items()}
        self._last: dict[str, float] = {}
        self._restarts = self._make(Gauge, "engine_restarts", "Times the engine was lost and started again.")
        self._in_flight = self._make(
            Gauge, "num_requests_in_flight", "Requests the server has not answered in full."
        )
        self._prompt = self._make(
            Counter, "prompt_tokens", "Prompt tokens of requests that the engine took in."
        )
        self._generation = self._make(Counter, "generation_tokens", "Tokens generated.")
        self._success = Counter(
            PREFIX + "request_success", "Requests that ended, by how.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._http = Counter(
            PREFIX + "http_requests",
            "HTTP answers.",
            ["model_name", "route", "status"],
            registry=self.registry,
        )
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token."
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt lengths.", _TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output lengths.", _TOKENS)

    def _make(self, kind: Any, name: str, text: str) -> Any:
        return kind(PREFIX + name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        made = Histogram(PREFIX + name, text, list(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)

    def finished(self, remote: RemoteRequest, reason: str) -> None:
        """Count a request that has ended: ``done``, ``abort`` or ``error``."""
        self._success.labels(finished_reason=reason, **self._labels).inc()
        count = remote.num_output_tokens
        self._prompt_length.observe(len(remote.prompt_token_ids))
        self._output_length.observe(count)
        if remote.queued is not None:
            self._queue.observe(remote.queued)
        if remote.first_token is not None and remote.last_token is not None:
            self._first.observe(remote.first_token - remote.arrival)
            self._prefill.observe(max(remote.first_token - remote.arrival - (remote.queued or 0.0), 0.0))
            self._decode.observe(remote.last_token - remote.first_token)
        self._whole.observe(time.monotonic() - remote.arrival)
        for gap in remote.gaps:
            self._gap.observe(gap)

    def http(self, route: str, status: int) -> None:
        self._http.labels(route=route, status=str(status), **self._labels).inc()

    def render(self, client: EngineClient, restarts: int) -> bytes:
        """The text that Prometheus scrapes."""
        for stat, gauge in self._gauges.items():
            gauge.set(client.stats[stat])
        for stat, counter in self._counters.items():
            self._advance(counter, stat, client.stats[stat])
        self._advance(self._prompt, "prompt", client.num_prompt_tokens)
        self._advance(self._generation, "generation", client.num_output_tokens)
        self._restarts.set(restarts)
        self._in_flight.set(client.in_flight)
        return generate_latest(self.registry)

    def _advance(self, counter: Any, name: str, value: float) -> None:
        before = self._last.get(name, 0)
        counter.inc(value - before if value >= before else value)  # a new engine begins at 0 again
        self._last[name] = value
