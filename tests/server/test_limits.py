"""Keys, sizes, queues, time limits, shutting down: what a server refuses, and how."""

from __future__ import annotations

import json
import socket
import threading

import httpx2 as httpx
import openai
import pytest

from paged_backend.logs import LogFormat
from paged_backend.server.config import ServerConfig
from paged_backend.server.run.auth import ApiKeys, collect_keys

HELLO = [{"role": "user", "content": "hi"}]
LONG = {"messages": HELLO, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


def begin(server, body) -> tuple[threading.Thread, list]:
    """Post in the background."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/chat/completions", body)))
    thread.start()
    return thread, found


def test_every_route_but_health_wants_a_key(start, until):
    with start(api_keys=("one", "two")) as server:
        for path in (
            "/",
            "/docs",
            "/openapi.json",
            "/v1/models",
            "/metrics",
            "/stats",
            "/ready",
            "/version",
            "/nothing",
        ):
            response = server.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert server.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key="three").models.list()
        assert server.client(api_key="two").models.list().data
        page = server.get("/", headers={"accept": "text/html"})
        assert page.headers["www-authenticate"].startswith("Basic")
        assert server.get("/", auth=("anybody", "one")).status_code == 200


def test_keys_are_compared_whole_and_collected_from_everywhere(tmp_path):
    keys = ApiKeys(("secret", "other"))
    assert keys.admits("Bearer secret")
    assert keys.admits("bearer  other")
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer secre",
        "Bearer secrets",
        "Basic !!",
        "secret",
        "Basic c2VjcmV0",
        "Bearer \xff",
    ):
        assert not keys.admits(wrong)
    assert ApiKeys(()).admits(None)
    file = tmp_path / "keys"
    file.write_text("# comment\nc\n\n d \n")
    assert collect_keys(("a",), file, {"PAGED_BACKEND_API_KEY": "b, a"}) == ("a", "b", "c", "d")
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no API key"):
        collect_keys((), file, {})


def test_bodies_beyond_the_limit_are_refused_with_or_without_a_length(start):
    with start(max_body_bytes=2000) as server:
        big = {"prompt": "a" * 3000}
        response = server.post("/v1/completions", big)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        chunks = iter([b'{"prompt": "', *[b"a" * 500] * 8, b'"}'])
        response = httpx.post(
            server.url + "/v1/completions", content=chunks, headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_a_429_with_a_time(start, until):
    with start({"max_num_seqs": 2}, max_waiting=1) as server, server.hold() as gate:
        running = [begin(server, LONG) for _ in range(3)]
        until(lambda: server.serving.client.in_flight == 3)
        response = server.post("/v1/chat/completions", LONG)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        gate.open()
        for thread, found in running:
            thread.join(60)
            assert found[0].status_code == 200
        too_many = server.post("/v1/completions", {"prompt": "a", "n": 4})
        assert too_many.status_code == 400
        # a client with retries gets through
        gate.close()
        running = [begin(server, LONG) for _ in range(3)]
        until(lambda: server.serving.client.in_flight == 3)
        refused = []

        def go_on(response) -> None:
            if response.status_code == 429:
                refused.append(response)
                gate.open()

        http_client = openai.DefaultHttpxClient(event_hooks={"response": [go_on]})
        answer = server.client(max_retries=5, http_client=http_client).chat.completions.create(
            model=server.serving.name, messages=HELLO, max_tokens=1
        )
        assert answer.choices
        assert refused
        for thread, _ in running:
            thread.join(60)


def test_the_time_limit_ends_requests_and_frees_their_blocks(start, until):
    with start(request_timeout=0.05) as server, server.hold() as gate:
        response = server.post("/v1/chat/completions", LONG)
        assert response.status_code == 408
        assert response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match="took longer"):  # instead of the stream, or in its middle
            list(
                server.client().chat.completions.create(
                    model=server.serving.name,
                    stream=True,
                    messages=HELLO,
                    max_tokens=1000,
                    extra_body={"ignore_eos": True},
                )
            )
        gate.open()
        until(lambda: server.idle)


def test_shutting_down_finishes_what_runs_and_refuses_what_comes(start, until):
    with start() as server, server.hold() as gate:
        thread, found = begin(server, LONG)
        until(lambda: server.serving.client.in_flight == 1)
        server.serving.draining = True
        response = server.post("/v1/chat/completions", LONG)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"]
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        server.serving.draining = False
        server.server.handle_exit(15, None)
        gate.open()
        thread.join(60)
        assert found[0].status_code == 200
        assert found[0].json()["usage"]["completion_tokens"] == 1000
        server.thread.join(60)
        assert not server.thread.is_alive()


def test_a_drain_that_takes_too_long_is_cut_off(start, until):
    with start({"max_num_seqs": 1}, drain_timeout=0.1) as server, server.hold():
        running = [begin(server, LONG) for _ in range(12)]
        until(lambda: server.serving.client.in_flight == 12)
    for thread, _ in running:
        thread.join(60)
        assert not thread.is_alive()


def test_cors_is_off_unless_asked_for(server, start):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(server.url + "/v1/models", headers=ask).headers
    with start(cors_origins=("https://a.example",)) as open_server:
        response = httpx.options(open_server.url + "/v1/models", headers=ask)
        assert response.headers["access-control-allow-origin"] == "https://a.example"


def test_request_ids_are_echoed_or_made(server):
    assert server.get("/v1/models", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = server.get("/v1/models", headers={"x-request-id": "x" * 999}).headers["x-request-id"]
    assert len(made) == 32
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"


def test_health_metrics_and_stats(server):
    server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 3})
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").status_code == 200
    text = server.get("/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "kv_cache_committed_bytes", "prefix_cache_hits_total",
                 "generation_tokens_total",
                 "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count",
                 "e2e_request_latency_seconds_sum", "request_success_total"):  # fmt: skip
        assert f"paged_backend:{name}" in text
    assert server.get("/stats").json()["engine"]["health"] == "ok"
    assert server.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"port": -1}, "port"),
        ({"port": True}, "port"),
        ({"host": ""}, "host"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"api_keys": ("a b ",)}, "api_keys"),
        ({"drain_timeout": 0}, "drain_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"log_format": "xml"}, "log_format"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
    ],
)
def test_options_out_of_range_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        ServerConfig(**options)


def test_logs_say_what_was_done_and_not_what_was_said(start, caplog):
    body = {"prompt": "a secret prompt", "max_tokens": 3, "ignore_eos": True}
    caplog.set_level("INFO", "paged_backend.server")
    for log_prompts in (False, True):
        caplog.clear()
        with start(log_prompts=log_prompts) as server:
            server.post("/v1/completions", body)
        lines = [LogFormat(as_json=True).format(record) for record in caplog.records]
        fields = next(line for line in map(json.loads, lines) if line.get("route") == "/v1/completions")
        assert fields["status"] == 200
        assert fields["output_tokens"] == 3
        assert len(fields["request_id"]) == 32
        assert ("a secret prompt" in str(lines)) == log_prompts
        text = [LogFormat(as_json=False).format(record) for record in caplog.records]
        assert any("POST /v1/completions 200" in line and "output_tokens=3" in line for line in text)


def test_one_slow_grammar_holds_up_nobody(start, until):
    pytest.importorskip("llguidance")
    form = {"structured_outputs": {"regex": "a+"}, "prompt": "a", "max_tokens": 3}
    with start() as server:
        session = server.serving.supervisor.transport._session
        compile_, go = server.engine.grammars.compile, threading.Event()

        def slow(wanted):
            go.wait(60)
            return compile_(wanted)

        server.engine.grammars.compile = slow
        first = threading.Thread(target=lambda: server.post("/v1/completions", form))
        first.start()
        until(lambda: session._at_door)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
        data = json.dumps(form)
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            gone.sendall(f"{head}content-length: {len(data)}\r\n\r\n{data}".encode())
            until(lambda: len(session._at_door) == 2)
        until(lambda: sorted(session._at_door.values()) == [False, True])
        go.set()
        first.join(60)
        until(lambda: server.idle and not session._at_door)
