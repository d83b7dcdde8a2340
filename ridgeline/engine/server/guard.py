"""The door: keys, hosts, slow readers and errors, around every route alike (ASGI).

Keys are compared in constant time on every route but /health, unknown ones included. A browser's
request from another site is refused, and where no key protects a loopback address so is a foreign
Host header (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.engine.server.config import is_loopback
from ridgeline.engine.server.errors import ApiError, internal
from ridgeline.engine.server.sse import ClientGoneError
from ridgeline.engine.server.state import ServerState, log, new_id

OPEN_ROUTES = frozenset({"/health"})
"""The only ones without a key."""
UNREAD = frozenset({401, 403, 408, 413, 415, 431})
"""Answers that may come before the body was read: the connection ends with them."""


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, state: ServerState, routes: Iterable[str]) -> None:
        self._app, self._state = app, state
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
                return
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._state, scope)
        headers = Headers(scope=scope)
        try:
            if sum(map(len, itertools.chain(*headers.raw))) > self._state.config.max_header_bytes:
                most = self._state.config.max_header_bytes
                raise ApiError(
                    431, f"headers must be at most {most} bytes", code="headers_too_large"
                )
            self._check_site(headers)
            scope["ridgeline.key"] = self._check_key(scope["path"], headers)
            await self._app(scope, receive, answer)
        except ClientGoneError:
            self._state.counters.client_gone += not answer.slow
        except ApiError as error:
            await answer.fail(error, scope, receive)
        except Exception:
            request_id = new_id("req")
            log.exception("%s failed", request_id)
            await answer.fail(internal(request_id), scope, receive)
        finally:
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._state.counters.answers[route, answer.status] += 1

    def _check_site(self, headers: Headers) -> None:
        host = _name(headers.get("host", ""))
        if origin := headers.get("origin"):
            if _netloc(origin).lower() != headers.get("host", "").lower():
                raise ApiError(
                    403, "requests from pages of another site are refused", code="origin"
                )
        config = self._state.config
        if config.loopback and not config.api_keys and host and not is_loopback(host):
            raise ApiError(
                403, f"the Host header must name this machine, got {host[:60]!r}", code="host"
            )

    def _check_key(self, path: str, headers: Headers) -> str:
        """The key that was given; "" where none is needed. Raises: ApiError 401."""
        keys = self._state.config.api_keys
        if not keys or path in OPEN_ROUTES:
            return ""
        given = _given_key(headers.get("authorization", ""))
        # Every key is compared, so that the time tells neither which nor how much matched.
        matches = [hmac.compare_digest(given, key.encode("utf-8")) for key in keys]
        if not any(matches):
            challenge = "Basic" if path == "/" else "Bearer"
            raise ApiError(
                401, "a valid API key must be sent: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": f'{challenge} realm="ridgeline"'},
            )  # fmt: skip
        return given.decode("utf-8", "replace")


def _given_key(authorization: str) -> bytes:
    """The key of `Bearer KEY`, or of `Basic` with the key as password (a browser's dialog)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _netloc(origin: str) -> str:
    """Host and port of an origin; "" for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name(host: str) -> str:
    """The Host header without its port."""
    return host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")


class _Answer:
    """`send`, with the status remembered and a bound on how long a reader may take nothing."""

    def __init__(self, send: Send, state: ServerState, scope: Scope) -> None:
        self._send, self._state, self._scope = send, state, scope
        self.status = 499  # the client left before anything was sent
        self.slow = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        try:
            async with asyncio.timeout(self._state.config.write_timeout_s):
                await self._send(message)
        except TimeoutError:
            self.slow = True
            self._state.counters.slow_readers += 1
            if abort := self._scope.get("state", {}).get("abort"):
                abort()
            raise ClientGoneError from None
        except OSError:
            raise ClientGoneError from None

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send an error, if nothing was sent yet."""
        if self.status != 499:
            return
        headers = dict(error.headers)
        if error.status in UNREAD:
            headers["Connection"] = "close"
        response: Response = JSONResponse(error.body(), error.status, headers=headers)
        try:
            await response(scope, receive, self)
        except ClientGoneError:
            self._state.counters.client_gone += not self.slow
