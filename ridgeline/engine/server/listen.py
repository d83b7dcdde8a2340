"""The server's address. Imports nothing of the engine: a port in use is said at once."""

from __future__ import annotations

import errno
import socket

from ridgeline.core.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: UserError for a port in use or an address that is not here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UserError(
            f"serve: host {host} must be an address of this machine: {error}"
        ) from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"serve: port {port} on {host} must be free, got one in use; stop the other server "
                "or give --port (0: any free one)"
            ) from error
        raise UserError(f"serve: could not listen on {host}:{port}: {error.strerror}") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """http://host:port of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
