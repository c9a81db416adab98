"""Taking the server's port."""

from __future__ import annotations

import errno
import socket

from paged_backend.errors import PagedBackendError

BACKLOG = 2048
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ListenError(PagedBackendError):
    """The server cannot listen where it was told to; the message names the fix."""


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for every address of ``host``, all on one port; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"there is no address for {host!r} ({error.strerror}): --host 127.0.0.1") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if sockets:
                port = sockets[0].getsockname()[1]
            # asyncio sets TCP_NODELAY only on connections of sockets that name their protocol
            made = socket.socket(family, kind, protocol)
            sockets.append(made)
            # on Windows "reuse" would share a port that another process listens on
            exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
            made.setsockopt(socket.SOL_SOCKET, exclusive or socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], port, *address[2:]))
            made.listen(BACKLOG)  # until then another process could take the port as well
            made.setblocking(False)
    except OSError as error:
        for made in sockets:
            made.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(f"port {port} is in use: --port N takes another, 0 a free one") from error
        raise ListenError(
            f"cannot listen on port {port} of {host}: {error.strerror}; see --host and --port"
        ) from error
    return sockets


def url_of(host: str, listening: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    name = _EVERYWHERE.get(host, host)
    port = listening.getsockname()[1]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
