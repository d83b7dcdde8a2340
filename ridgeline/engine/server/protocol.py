"""uvicorn's HTTP/1.1 connection with bounds: headers within a time and a size, so many connections.

uvicorn bounds an incomplete request line and headers (h11_max_incomplete_event_size) but not how
long they may take, and counts connections only to answer 503.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

FULL = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: 100\r\n\r\n"
    b'{"error":{"message":"too many connections","type":"rate_limit_error","param":null,"code":'
    b'"busy"}}  \n'
)


def bounded_protocol(header_timeout_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """A connection class for uvicorn's Config(http=...)."""

    class BoundedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            state: dict[str, Any] = {**self.app_state, "abort": self.transport.abort}
            self.app_state = state
            if len(self.connections) > max_connections:
                self.transport.write(FULL)
                self.transport.close()
                return
            self._wait_for_headers()

        def _wait_for_headers(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self._headers_late)

        def _headers_late(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before and self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            elif self._header_timer is None and (
                self.cycle is not None and self.cycle.response_complete
            ):
                self._wait_for_headers()  # the start of the next request on a kept connection

        def connection_lost(self, exc: Exception | None) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
            super().connection_lost(exc)

    return BoundedProtocol
