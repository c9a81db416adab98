"""The engine's process: ``python -m paged_backend.remote.worker LINE``, where ``own_line`` makes a socket of LINE.

First comes a message with the engine's options, then those of ``EngineSession``. When the other end goes away, so does
this process.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from paged_backend.logs import set_up_logging
from paged_backend.remote.line import own_line
from paged_backend.remote.protocol import HEADER, Message, pack, unpack


def main(argument: str) -> None:
    """Serve the line until it is closed."""
    # Ctrl-C is for the other end, which drains and then closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = own_line(argument)
    options = _receive(line)
    if options is None:
        return
    set_up_logging(options["log_format"])
    outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(line, outgoing), daemon=True).start()
    try:
        engine = _open(options["config"])
    except Exception as error:
        line.sendall(pack({"t": "failed", "message": str(error) or type(error).__name__}))
        return
    from paged_backend.remote.session import EngineSession

    session = EngineSession(engine, outgoing.put)
    outgoing.put(session.hello())
    while (message := _receive(line)) is not None:
        session.handle(message)
    # nobody is left to read what the engine still computes, and the system frees its memory faster than it could
    os._exit(0)


def _open(config: dict[str, Any]) -> Any:
    from paged_backend.config import EngineConfig
    from paged_backend.engine.factory import build_engine

    return build_engine(EngineConfig(**config))


def _write(line: socket.socket, outgoing: queue.SimpleQueue[Message]) -> None:
    while True:
        try:
            line.sendall(pack(outgoing.get()))
        except OSError:
            os._exit(0)


def _receive(line: socket.socket) -> Message | None:
    """The next message, None at the end."""
    header = _exactly(line, HEADER.size)
    body = _exactly(line, HEADER.unpack(header)[0]) if header is not None else None
    return None if body is None else unpack(body)


def _exactly(line: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = line.recv(min(count - len(parts), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main(sys.argv[1])
