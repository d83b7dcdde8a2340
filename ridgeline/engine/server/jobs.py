"""Runs jobs in a worker process that can be killed (worker.py), from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

MAX_ANSWER_BYTES = 64 * 2**20
START_S = 60.0
"""A fresh worker's imports, and what it reads once, are not the job's time."""
BUSY_FACTOR = 6.0
"""A job's time is its process's own; on the clock it may take so many times as long."""


class JobTimeoutError(Exception):
    """The job took too long, or was too large, and its process is gone."""


class Worker:
    """One process, one job at a time; started when first needed, again after it died."""

    def __init__(self, first: dict[str, Any] | None = None) -> None:
        """first: a job that each new process does before any other."""
        self._first = first
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, job: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """The answer of a job. Raises: JobTimeoutError."""
        line = _line({"job": job, "timeout_s": timeout_s, **fields})
        async with self._turn:
            try:
                if self._process is None or self._process.returncode is not None:
                    async with asyncio.timeout(START_S):
                        await self._start()
                async with asyncio.timeout(BUSY_FACTOR * timeout_s + 1.0):
                    return await self._exchange(line)
            except (
                TimeoutError,
                ConnectionError,
                asyncio.IncompleteReadError,
                ValueError,
            ) as error:
                await self._kill()
                raise JobTimeoutError(f"{job} took longer than {timeout_s:g} seconds") from error
            except asyncio.CancelledError:
                await self._kill()  # its answer would be read as the next job's
                raise

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.write(line)
        await self._process.stdin.drain()
        answer = await self._process.stdout.readuntil(b"\n")
        return json.loads(answer)

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ridgeline.engine.server.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_ANSWER_BYTES,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        first = self._first or {"job": "nothing"}
        await self._exchange(_line({**first, "timeout_s": START_S}))

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def close(self) -> None:
        """End the process."""
        await self._kill()


def _line(job: dict[str, Any]) -> bytes:
    return json.dumps(job).encode("ascii") + b"\n"
