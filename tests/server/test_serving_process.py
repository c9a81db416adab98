"""``paged-backend serve`` as a process of its own: its port, its log, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time

import httpx2 as httpx
import pytest

from paged_backend.server.run.listening import ListenError, listen, url_of


@pytest.fixture
def serve(tiny_model, tmp_path):
    """``serve(*options)`` -> the process and a function that reads its log so far."""
    started = []

    def call(*options):
        log = tmp_path / f"log{len(started)}"
        command = ["serve", tiny_model, "--kernels", "reference", "--served-model-name", "tiny", *options]
        with log.open("w") as target:
            process = subprocess.Popen(
                [sys.executable, "-m", "paged_backend", *command],
                stderr=target,
                # a test run started in the background by a shell ignores SIGINT, and its children would inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        started.append(process)
        return process, log.read_text

    yield call
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_taken_port_is_said_before_the_model_is_loaded(serve):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process, log = serve("--port", str(port))
        assert process.wait(60) == 1
    assert log() == f"paged-backend: port {port} is in use: --port N takes another, 0 a free one\n"


def test_the_log_names_the_model_while_it_loads_and_then_the_address(serve, free_port):
    process, log = serve("--port", str(free_port))
    answer = None
    while answer is None:  # once the port is open, the answer comes when the model is loaded
        assert process.poll() is None
        with contextlib.suppress(httpx.ConnectError):
            answer = httpx.get(f"http://127.0.0.1:{free_port}/page/chat.js", timeout=60)
        time.sleep(0.05)
    assert answer.status_code == 200
    loading, serving, *_ = log().splitlines()
    assert "INFO loading /" in loading
    assert serving.endswith(f"INFO tiny is served at http://127.0.0.1:{free_port}/v1")
    while "/page/" not in log():
        time.sleep(0.01)
    assert "GET /page/chat.js 200" in log()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert log().splitlines()[-1].endswith("INFO shutting down")


@pytest.mark.parametrize("options", [[], ["--in-process"]])
def test_the_first_ctrl_c_says_what_it_waits_for_and_the_second_ends_without_a_traceback(
    serve, free_port, until, options
):
    process, log = serve("--port", str(free_port), "--drain-timeout", "60", *options)
    until(lambda: "served at" in log(), 60)
    body = {"prompt": "the fox", "max_tokens": 1000, "stream": True, "ignore_eos": True, "n": 16}
    with httpx.stream(
        "POST", f"http://127.0.0.1:{free_port}/v1/completions", json=body, timeout=60
    ) as answer:
        arriving = answer.iter_bytes()  # kept: an iterator that is dropped closes the connection
        next(arriving)
        process.send_signal(signal.SIGINT)
        until(lambda: "shutting down" in log())
        assert "1 requests may finish within 60 s; Ctrl-C again stops at once" in log()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "Traceback" not in log()
    assert "CancelledError" not in log()


def test_where_reuse_would_share_a_port_with_others_it_is_not_asked_for(monkeypatch):
    """As on Windows, which has an option to be alone; another that can be read back stands for it here."""
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_KEEPALIVE, raising=False)
    (made,) = listen("127.0.0.1", 0)
    with made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not made.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_a_listening_socket_is_one_that_no_other_process_gets_and_that_answers_without_delay():
    (taken,) = listen("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} is in use"):
            listen("127.0.0.1", port)
        assert taken.proto == socket.IPPROTO_TCP  # asyncio looks at it before it sets TCP_NODELAY
        assert url_of("0.0.0.0", taken) == f"http://127.0.0.1:{port}"
        assert url_of("::1", taken) == f"http://[::1]:{port}"


def test_a_host_without_an_address_is_named():
    with pytest.raises(ListenError, match=r"no address for 'no\.such\.host\.invalid'"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ListenError, match="cannot listen"):
        listen("203.0.113.7", 0)
