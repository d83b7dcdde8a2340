"""One HTTP request at the engine: one or more prompts, started together, read together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.engine.client import OutputStream
from ridgeline.engine.outputs import Delta, RequestOutput, Usage
from ridgeline.engine.params import MaskFactory, SamplingParams
from ridgeline.engine.server.errors import BROKEN, ApiError, from_engine, invalid
from ridgeline.engine.server.state import ServerState, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes to the engine."""

    request_id: str
    route: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    names: Mapping[str, str]
    """The engine's argument names -> the client's parameters."""
    salt: str = ""
    deadline_s: float = 600.0
    mask: MaskFactory | None = None
    grammar_param: str | None = None
    """The parameter that the mask came from."""
    label: str = ""
    """Who asked, for the log."""


@dataclass(slots=True)
class Generation:
    """A plan that runs."""

    plan: Plan
    streams: list[OutputStream]
    usages: dict[int, Usage] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    reasons: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, state: ServerState, plan: Plan, since_s: float) -> Generation:
        """Reserve everything or refuse at once; since_s: of the monotonic clock, when the
        request's time began. Raises: ApiError."""
        streams: list[OutputStream] = []
        engine = state.engine
        left_s = plan.deadline_s - (time.monotonic() - since_s)
        if left_s <= 0:
            raise too_late(plan.deadline_s)
        try:
            for prompt in plan.prompts:
                engine.check(prompt, plan.params)
            for number, prompt in enumerate(plan.prompts):
                streams.append(
                    engine.add_request(
                        prompt,
                        plan.params,
                        request_id=f"{plan.request_id}-{number}",
                        salt=plan.salt,
                        deadline_s=left_s,
                        mask=plan.mask,
                    )  # fmt: skip
                )
        except Exception as error:
            for number in range(len(streams)):
                engine.abort(f"{plan.request_id}-{number}")
            if (answer := from_engine(error, plan.names)).status == 500:
                log.exception("request %s could not be started", plan.request_id)
            raise answer from error
        return cls(plan, streams)

    async def outputs(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice index, delta) as they come; ends when all choices have.

        Raises: ApiError for a choice that the engine could not finish.
        """
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                for pair in self._deltas(0, output):
                    yield pair
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(64)
        readers = [
            asyncio.ensure_future(self._read(number, queue)) for number in range(len(self.streams))
        ]
        try:
            left = len(readers)
            while left:
                number, output = await queue.get()
                if output is None:
                    left -= 1
                elif isinstance(output, Exception):
                    raise output
                else:
                    for pair in self._deltas(number, output):
                        yield pair
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, number: int, queue: asyncio.Queue) -> None:
        try:
            async for output in self.streams[number]:
                await queue.put((number, output))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    def _deltas(self, number: int, output: RequestOutput) -> list[tuple[int, Delta]]:
        self.usages[number] = output.usage
        pairs = []
        for delta in output.deltas:
            if delta.finish_reason is not None:
                self.reasons.append(delta.finish_reason)
            self._check(delta, output.error)
            pairs.append((number * self.plan.params.n + delta.index, delta))
        return pairs

    def _check(self, delta: Delta, error: str | None) -> None:
        reason = delta.finish_reason
        if reason == "deadline":
            raise too_late(self.plan.deadline_s)
        if reason == "abort":
            raise ApiError(503, "the request was ended by the server", kind=BROKEN, code="aborted")
        if reason == "error" and self.plan.mask is not None:
            what = self.plan.grammar_param or "response_format"
            message = error or "its grammar allows no further token"
            raise invalid(what, f"{what!r} could not be followed: {message}", "grammar_failed")
        if reason == "error":
            log.error("request %s: %s", self.plan.request_id, error)
            raise ApiError(500, error or "the request failed", kind=BROKEN, code="internal_error")

    @property
    def usage(self) -> Usage:
        """All prompts' counts together."""
        return Usage(
            prompt_tokens=sum(each.prompt_tokens for each in self.usages.values()),
            completion_tokens=sum(each.completion_tokens for each in self.usages.values()),
            cached_tokens=sum(each.cached_tokens for each in self.usages.values()),
        )

    async def close(self, state: ServerState) -> None:
        """Abort what still runs, and tell the log."""
        for number, stream in enumerate(self.streams):
            state.engine.abort(f"{self.plan.request_id}-{number}")
            with contextlib.suppress(Exception):
                await stream.aclose()
        usage = self.usage
        log.info(
            "%s %s%s: %d prompt tokens (%d cached), %d new, %s, %.2f s",
            self.plan.route, self.plan.request_id, self.plan.label, usage.prompt_tokens,
            usage.cached_tokens, usage.completion_tokens, ",".join(self.reasons) or "left",
            time.monotonic() - self.started,
        )  # fmt: skip


def too_late(deadline_s: float) -> ApiError:
    """The answer to a request whose time is over."""
    return ApiError(
        408, f"the request took longer than {deadline_s:g} seconds", param="deadline_s",
        code="deadline_exceeded",
    )  # fmt: skip


def salt_of(key: str, cache_key: str) -> str:
    """What separates the prefix caches of keys; "" where nothing does."""
    if not key and not cache_key:
        return ""
    return hashlib.sha256(f"{len(key)}:{key}{cache_key}".encode()).hexdigest()


def log_label(**labels: str) -> str:
    """` user='alice'` for the log, on one line."""
    return "".join(f" {name}={value!r}" for name, value in labels.items() if value)
