"""A small HTTP client for loading a server: one connection a request, events as they come.

Plain asyncio: the client must cost less than what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ridgeline.core.errors import UserError

CONNECT_S = 10.0


@dataclass(slots=True)
class Answer:
    """What one request brought, with times since its start in seconds."""

    status: int = 0
    """0: no answer at all."""
    error: str = ""
    first_s: float = 0.0
    end_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """Of every event that carried text."""
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    retry_after: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == 200 and not self.error and self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Target:
    """A server."""

    url: str
    key: str | None = None

    def headers(self, length: int) -> bytes:
        """Of a request with a body of so many bytes."""
        parts = urlsplit(self.url)
        lines = [f"Host: {parts.netloc}", "Content-Type: application/json", "Connection: close"]
        lines.append(f"Content-Length: {length}")
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection. Raises: OSError, TimeoutError."""
    parts = urlsplit(target.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    tls = True if parts.scheme == "https" else None
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=2**22)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return int(lines[0].split(" ")[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def events(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    held = b""
    async for piece in _body(reader, headers):
        held += piece
        *whole, held = held.split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:].decode("utf-8")


async def ask(target: Target, path: str, body: Mapping[str, Any]) -> Answer:
    """One streamed request, to its end; what goes wrong is in the answer."""
    answer, start = Answer(), time.perf_counter()
    writer = None
    try:
        reader, writer = await connect(target)
        data = json.dumps(body).encode()
        request = f"POST {urlsplit(target.url).path.rstrip('/')}{path} HTTP/1.1\r\n".encode()
        writer.write(request + target.headers(len(data)) + data)
        await writer.drain()
        answer.status, headers = await _head(reader)
        answer.retry_after = headers.get("retry-after")
        if answer.status != 200:
            pieces = [piece async for piece in _body(reader, headers)]
            answer.error = b"".join(pieces).decode("utf-8", "replace")[:500]
        else:
            async for event in events(reader, headers):
                _take(answer, event, time.perf_counter() - start)
    except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    answer.end_s = time.perf_counter() - start
    return answer


def _take(answer: Answer, event: str, now_s: float) -> None:
    if event == "[DONE]":
        return
    chunk = json.loads(event)
    if "error" in chunk:
        answer.error = chunk["error"].get("message", "error")
        return
    for choice in chunk["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if text or choice.get("finish_reason"):
            answer.text += text or ""
            answer.first_s = answer.first_s or now_s
            answer.arrivals_s.append(now_s)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0


async def fetch(target: Target, path: str) -> Any:
    """JSON of a GET. Raises: UserError for a server that is not there or refuses."""
    writer = None
    try:
        reader, writer = await connect(target)
        request = f"GET {urlsplit(target.url).path.rstrip('/')}{path} HTTP/1.1\r\n".encode()
        writer.write(request + target.headers(0))
        status, headers = await _head(reader)
        data = b"".join([piece async for piece in _body(reader, headers)])
        if status != 200:
            raise UserError(f"bench: {target.url}{path} answered {status}: {data[:300].decode()}")
        return json.loads(data)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        raise UserError(
            f"bench: a server must listen at {target.url}, got {error or type(error).__name__}; "
            "start one with ridgeline serve"
        ) from error
    finally:
        if writer is not None:
            writer.close()
