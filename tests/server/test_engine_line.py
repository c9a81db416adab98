"""The line to the engine's process: inherited, and as on Windows, where no socket is."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from paged_backend.config import EngineConfig
from paged_backend.remote import line as line_module
from paged_backend.remote.line import start_with_line
from paged_backend.remote.transports import EngineLostError, ProcessTransport

ECHO = (
    "import sys\n"
    "from paged_backend.remote.line import own_line\n"
    "line = own_line(sys.argv[1])\n"
    "while got := line.recv(100): line.sendall(got)\n"
)


@pytest.fixture(params=[True, False], ids=["inherited", "connected"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(line_module, "_INHERITED", request.param)
    return request.param


async def hello_over(code: str) -> bytes:
    process, line = await start_with_line((sys.executable, "-c", code))
    reader, writer = await asyncio.open_connection(sock=line)
    try:
        writer.write(b"hello")
        answer = await reader.read(5)
    except OSError:
        answer = b""
    writer.close()
    await process.wait()
    return answer


def test_what_is_said_arrives_and_the_process_ends_with_the_line(way: bool) -> None:
    assert asyncio.run(hello_over(ECHO)) == b"hello"


def test_a_process_that_never_takes_its_end_is_a_closed_line(way: bool) -> None:
    assert asyncio.run(hello_over("import sys; sys.exit(3)")) == b""


def test_a_process_that_dies_at_its_start_is_told_with_its_status(way: bool) -> None:
    async def main() -> None:
        transport = ProcessTransport(EngineConfig("x"), (sys.executable, "-c", "import sys; sys.exit(3)"))
        try:
            await transport.open(lambda message: None)
        finally:
            await transport.close()

    with pytest.raises(EngineLostError, match="status 3"):
        asyncio.run(main())


def test_nobody_but_the_process_gets_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_INHERITED", False)
    strangers: list[socket.socket] = []
    make = socket.create_server

    def watched(address: tuple[str, int]) -> socket.socket:
        door = make(address)
        for secret in (b"", b"x" * 32, b"short"):  # who connects before the process can
            strangers.append(socket.create_connection(door.getsockname()))
            strangers[-1].sendall(secret)
        strangers[0].close()
        strangers[2].shutdown(socket.SHUT_WR)
        return door

    monkeypatch.setattr(line_module.socket, "create_server", watched)
    assert asyncio.run(hello_over(ECHO)) == b"hello"
    for stranger in strangers[1:]:
        with stranger:
            assert stranger.recv(1) == b""
