"""Two minutes of everything at once, against a server process of its own; and all bodies schemathesis thinks of."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SECONDS = 120


@pytest.fixture
def served(tiny_model, until, tmp_path):
    """(url, process) of ``paged-backend serve`` as a user starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "paged_backend",
        "serve",
        tiny_model,
        "--port",
        str(port),
        "--threads",
        "1",
    ]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([*command, "--request-timeout", "60"], stderr=log, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError((tmp_path / "log").read_text())
        try:
            return urllib.request.urlopen(url + "/ready", timeout=5).status == 200
        except urllib.error.URLError:
            return False

    until(ready, 120)
    yield url, process
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    log.close()
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert " ERROR " not in text


def stats(url: str) -> dict:
    return json.load(urllib.request.urlopen(url + "/stats", timeout=10))


def resident(process: subprocess.Popen) -> int:
    """Bytes held by the server's process; the engine's pool is bounded by its own limit."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load(url: str, seconds: float) -> dict:
    script = Path(__file__).with_name("load.py")
    done = subprocess.run(
        [sys.executable, str(script), url, str(seconds)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_64_streams_with_everything_mixed_in(served, until):
    url, process = served
    load(url, SECONDS / 6)  # what is made once is made now
    until(lambda: not stats(url)["in_flight"], 60)
    before = resident(process)
    seen = load(url, SECONDS)
    print(json.dumps(seen))
    allowed = {"bad": {"400"}, "oversized": {"400"}, "stream": {"200"}, "leave": {"200"}, "whole": {"200"}}
    for name in seen["statuses"]:
        kind, status = name.split()
        assert status in allowed[kind], name
    assert seen["broken"] == []

    def free() -> bool:
        found = stats(url)
        return not found["in_flight"] and not found["engine"]["kv_blocks_used"]

    until(free, 60)
    assert resident(process) - before < 16 << 20
    assert stats(url)["restarts"] == 0


def test_schemathesis_finds_no_server_error(served):
    tool = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("schemathesis is not installed")
    url, _ = served
    command = [tool, "run", url + "/openapi.json", "--checks", "not_a_server_error", "--max-examples", "30"]
    done = subprocess.run(
        [*command, "--phases", "fuzzing,coverage"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
