"""A request's body as JSON: bounded, within a time, strict."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from ridgeline.engine.server.errors import ApiError, invalid

MAX_DEPTH = 64
"""Nesting of arrays and objects; Python's own reader would go deeper than its stack."""


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> Any:
    """The body as JSON values.

    Raises: ApiError 400 for what is not JSON, 408 for a body that does not come, 413 for one that
    is too long, 415 for another content type; ClientDisconnect.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another site can post text/plain without asking; not this.
        raise ApiError(
            415, f"content-type must be application/json, got {kind[:60]!r}", code="content_type"
        )
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body must be sent within {timeout_s:g} seconds", code="request_timeout"
        ) from None
    return parse_json(data)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_long(max_bytes)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_long(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body must be at most {max_bytes} bytes", code="request_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, bounded nesting and numbers, no half surrogates."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise invalid(None, f"the body must be JSON: {reason}", "invalid_json") from error
    _check_depth(value)
    if "\\u" in text:
        _check_surrogates(value)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise invalid(None, f"the body must nest at most {MAX_DEPTH} deep", "invalid_json")
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += [v for v in each.values() if isinstance(v, dict | list)]
            elif isinstance(each, list):
                below += [v for v in each if isinstance(v, dict | list)]
        level = below


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            None, "the body must hold whole characters, got half a surrogate pair", "invalid_json"
        ) from error


__all__ = ["ClientDisconnect", "parse_json", "read_json"]
