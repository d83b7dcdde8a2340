"""Server-sent events, and the response that streams them to a client that may leave or stall."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.engine.server.errors import from_engine, internal
from ridgeline.engine.server.state import ServerState, log

KEEP_ALIVE_S = 15.0
"""Without news, a comment goes out so often: proxies keep the connection, a lost one is noticed."""
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(data: Any) -> bytes:
    """One event of JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class ClientGoneError(Exception):
    """The client closed its connection, or took so little that it was closed."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises: ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each piece of a generator as it comes; closes the generator however it ends.

    leave: called once at the end, whatever happened.
    """

    def __init__(
        self,
        state: ServerState,
        pieces: AsyncGenerator[bytes, None],
        leave: Callable[[], Awaitable[Any]],
        request_id: str,
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "X-Request-Id": request_id,
            },
        )
        del self.headers["content-length"]
        self._state, self._pieces, self._leave = state, pieces, leave
        self._request_id = request_id
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGoneError:
            if not self._complete:
                raise
        finally:
            with contextlib.suppress(Exception):
                await self._pieces.aclose()
            await self._leave()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for piece in _with_keep_alive(self._pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGoneError:
            raise
        except Exception as error:  # the status is sent: the error goes into the stream
            answer = from_engine(error)
            if answer.status == 500 and answer is not error:
                log.exception("request %s failed", self._request_id)
                answer = internal(self._request_id)
            body = event(answer.body()) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._complete = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_keep_alive(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    upcoming: asyncio.Future[bytes] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(pieces))
            while not (await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S))[0]:
                yield b": still at work\n\n"
            try:
                piece = upcoming.result()
            except StopAsyncIteration:
                return
            upcoming = None
            yield piece
    finally:
        if upcoming is not None and not upcoming.done():
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
