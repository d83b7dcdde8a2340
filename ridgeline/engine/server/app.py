"""The application: one table of routes, a guard around all of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ridgeline.engine.client import EngineClient
from ridgeline.engine.errors import UnavailableError
from ridgeline.engine.server import chat, chat_reply, completions
from ridgeline.engine.server.body import read_json
from ridgeline.engine.server.config import ServerConfig
from ridgeline.engine.server.embeddings import embeddings
from ridgeline.engine.server.errors import BROKEN, ApiError, from_engine
from ridgeline.engine.server.generation import Generation, too_late
from ridgeline.engine.server.guard import Guard
from ridgeline.engine.server.metrics import CONTENT_TYPE, health_json, metrics_text
from ridgeline.engine.server.reload import reload_weights
from ridgeline.engine.server.sse import ClientGoneError, EventStream, while_connected
from ridgeline.engine.server.state import ServerState, new_id

Handler = Callable[[Request, ServerState], Awaitable[Response]]


async def _chat(request: Request, state: ServerState) -> Response:
    return await _generate(
        request, state, _Endpoint("chatcmpl", chat.read_chat, chat.plan_chat,
                                  chat_reply.whole_answer, chat_reply.chunks),
    )  # fmt: skip


async def _completions(request: Request, state: ServerState) -> Response:
    return await _generate(
        request, state, _Endpoint("cmpl", completions.read_completion, completions.plan_completion,
                                  completions.whole_answer, completions.chunks),
    )  # fmt: skip


class _Endpoint:
    """The four steps of an endpoint that generates."""

    def __init__(self, prefix: str, read: Any, plan: Any, whole: Any, chunks: Any) -> None:
        self.prefix, self.read, self.plan, self.whole, self.chunks = (
            prefix, read, plan, whole, chunks,
        )  # fmt: skip


async def _generate(request: Request, state: ServerState, endpoint: _Endpoint) -> Response:
    """Read, check, reserve; then stream, or wait for the whole answer. Raises: ApiError."""
    if state.draining:
        raise _draining()
    inside = state.inside()
    await inside.__aenter__()
    generation: Generation | None = None

    async def leave() -> None:
        if generation is not None:
            await generation.close(state)
        await inside.__aexit__(None, None, None)

    streaming = False
    try:
        body = await read_json(request, state.config.max_body_bytes, state.config.body_timeout_s)
        asked = endpoint.read(state, body)
        request_id = new_id(endpoint.prefix)
        key = request.scope["ridgeline.key"]
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(asked.deadline_s):
                planning = endpoint.plan(state, asked, request_id, key)
                plan = await while_connected(request.receive, planning)
        except TimeoutError:
            raise too_late(asked.deadline_s) from None
        generation = Generation.start(state, plan, since_s)
        if asked.stream:
            pieces = endpoint.chunks(state, asked, generation)
            streaming = True
            return EventStream(state, pieces, leave, request_id)
        answer = await while_connected(request.receive, endpoint.whole(state, asked, generation))
        return JSONResponse(answer, headers={"X-Request-Id": request_id})
    finally:
        if not streaming:
            await leave()


def _draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down", kind=BROKEN, code="draining",
        headers={"Retry-After": "5"},
    )  # fmt: skip


async def _embeddings(request: Request, state: ServerState) -> Response:
    if state.draining:
        raise _draining()
    async with state.inside():
        body = await read_json(request, state.config.max_body_bytes, state.config.body_timeout_s)
        work = embeddings(state, body, request.scope["ridgeline.key"])
        return JSONResponse(await while_connected(request.receive, work))


def _model_json(state: ServerState) -> dict[str, Any]:
    info = state.engine.info
    return {
        "id": state.config.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "ridgeline",
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weights": info.weights,
        "dtype": info.dtype,
        "device": info.device,
    }


async def _models(request: Request, state: ServerState) -> Response:
    return JSONResponse({"object": "list", "data": [_model_json(state)]})


async def _model(request: Request, state: ServerState) -> Response:
    chat.read_model(state, {"model": request.scope["model"]})
    return JSONResponse(_model_json(state))


async def _health(request: Request, state: ServerState) -> Response:
    status, body = health_json(state)
    return JSONResponse(body, status, headers={"Cache-Control": "no-store"})


async def _metrics(request: Request, state: ServerState) -> Response:
    return PlainTextResponse(metrics_text(state), headers={"Content-Type": CONTENT_TYPE})


async def _reload(request: Request, state: ServerState) -> Response:
    body = await read_json(request, state.config.max_body_bytes, state.config.body_timeout_s)
    return JSONResponse(await reload_weights(state, body))


def _page_text() -> tuple[str, str]:
    """The chat page and its content-security-policy: only its own script and style, by hash."""
    text = files("ridgeline.engine.server").joinpath("page.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digests = [hashlib.sha256(body.encode()).digest() for body in bodies]
        return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


_PAGE, _POLICY = _page_text()


async def _page(request: Request, state: ServerState) -> Response:
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(_PAGE, headers=headers)


ROUTES: dict[str, tuple[str, Handler]] = {
    "/": ("GET", _page),
    "/health": ("GET", _health),
    "/metrics": ("GET", _metrics),
    "/v1/models": ("GET", _models),
    "/v1/models/{model}": ("GET", _model),
    "/v1/chat/completions": ("POST", _chat),
    "/v1/completions": ("POST", _completions),
    "/v1/embeddings": ("POST", _embeddings),
    "/admin/reload": ("POST", _reload),
}
"""Every path there is; /health alone needs no key (guard.py)."""


def build_app(
    engine: EngineClient, config: ServerConfig, *, folder: Path | None = None
) -> tuple[Guard, ServerState]:
    """The ASGI application over an engine, and what it shares."""
    state = ServerState(engine, config, folder)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handler = _find(request)
        try:
            response = await handler(request, state)
        except (ClientDisconnect, ClientGoneError):
            raise ClientGoneError from None
        except UnavailableError as error:
            raise from_engine(error) from error
        await response(scope, receive, send)

    return Guard(dispatch, state, ROUTES), state


def _find(request: Request) -> Handler:
    """The handler of a request. Raises: ApiError 404, 405."""
    path = request.scope["path"]
    name, model = path, path.removeprefix("/v1/models/")
    if model != path and model:
        name, request.scope["model"] = "/v1/models/{model}", model
    if name not in ROUTES or "{" in path:
        raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
    method, handler = ROUTES[name]
    allowed = {method, "HEAD"} if method == "GET" else {method}
    if request.method not in allowed:
        raise ApiError(
            405, f"{path} takes {method}, got {request.method[:20]}", code="method_not_allowed",
            headers={"Allow": ", ".join(sorted(allowed))},
        )  # fmt: skip
    return handler
