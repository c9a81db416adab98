"""The line to a process that is started: a socket that it inherits or, where sockets are not inherited, connects.

Windows hands no sockets to children. There the child connects to a port of this machine that is open for it alone: it
is told the port and a secret on its stdin, and says the secret first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence

_CONNECT = "connect"
_SECRET_BYTES = 32
_SECRET_TIMEOUT = 5.0  # seconds that somebody who connects gets to say it
_INHERITED = os.name == "posix"


async def start_with_line(command: Sequence[str]) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start ``command`` with one more argument, for :func:`own_line`; returns the process and this end of the line.

    The line is closed if the process has ended before it took its end.
    """
    if not _INHERITED:
        return await _start_and_let_connect(command)
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *command, str(theirs.fileno()), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    return process, ours


def own_line(argument: str) -> socket.socket:
    """The started process' end."""
    if argument != _CONNECT:
        return socket.socket(fileno=int(argument))
    port, secret = sys.stdin.readline().split()
    line = socket.create_connection(("127.0.0.1", int(port)))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(bytes.fromhex(secret))
    return line


async def _start_and_let_connect(
    command: Sequence[str],
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.setblocking(False)
        process = await asyncio.create_subprocess_exec(*command, _CONNECT, stdin=subprocess.PIPE)
        assert process.stdin is not None
        secret = secrets.token_bytes(_SECRET_BYTES)
        process.stdin.write(f"{door.getsockname()[1]} {secret.hex()}\n".encode())
        process.stdin.close()
        coming = asyncio.create_task(_who_knows(door, secret))
        ended = asyncio.create_task(process.wait())
        await asyncio.wait([coming, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in (coming, ended):
            task.cancel()
        await asyncio.wait([coming, ended])
    if coming.cancelled():
        ours, theirs = socket.socketpair()
        theirs.close()
        return process, ours
    return process, coming.result()


async def _who_knows(door: socket.socket, secret: bytes) -> socket.socket:
    """The first who connects and says ``secret``."""
    loop = asyncio.get_running_loop()
    while True:
        line, _ = await loop.sock_accept(door)
        said = b""
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            said = await asyncio.wait_for(_first_bytes(line), _SECRET_TIMEOUT)
        if hmac.compare_digest(said, secret):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line
        line.close()


async def _first_bytes(line: socket.socket) -> bytes:
    said = b""
    while len(said) < _SECRET_BYTES:
        part = await asyncio.get_running_loop().sock_recv(line, _SECRET_BYTES - len(said))
        if not part:
            break
        said += part
    return said
