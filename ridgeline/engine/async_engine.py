"""An LLM behind one thread, for callers on an event loop: the engine of the server.

The loop's side checks and reserves (a full queue is told at the call), the engine's thread steps
and sleeps when there is nothing to do; what a step brought goes back in one call a step. A step
that fails ends the requests it held, not the engine; three in a row end it, and health says so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ridgeline.core.errors import bad_value
from ridgeline.engine.client import ModelInfo, Pooling
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import DrainingError, EngineDeadError, QueueFullError
from ridgeline.engine.llm import LLM
from ridgeline.engine.outputs import EngineStats, Health, HealthState, RequestOutput
from ridgeline.engine.params import MaskFactory, Request, SamplingParams
from ridgeline.engine.weights import Weights

STALL_AFTER_S = 60.0
MAX_FAILURES = 3
MAX_RETRY_AFTER_S = 60.0
_log = logging.getLogger(__name__)


class RequestStream:
    """The outputs of one request."""

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        try:
            output = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(output, Exception):
            self._ended = True
            raise output
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        """Want nothing more: the request is aborted if it has not ended."""
        if not self._ended:
            self._ended = True
            self._engine.abort(self.request_id)

    def put(self, output: RequestOutput | Exception) -> None:
        """Called on the loop's thread."""
        self._queue.put_nowait(output)

    def __del__(self) -> None:
        if not self._ended:
            self._engine.abort(self.request_id)


class AsyncEngine:
    """An EngineClient over an LLM."""

    def __init__(self, llm: LLM, *, stall_after_s: float = STALL_AFTER_S) -> None:
        self.llm, self.stall_after_s = llm, stall_after_s
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._streams: WeakValueDictionary[str, RequestStream] = WeakValueDictionary()
        """Weak: a stream that its reader dropped aborts its request."""
        self._reserved: dict[str, int] = {}
        """Tokens that each open request may come to."""
        self._reserved_tokens = 0
        self._closing = self._draining = self._reloading = False
        self._dead: str | None = None
        self._last_step_s = time.monotonic()
        self._reload_lock = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)
        self._thread.start()
        if llm.workers is not None:
            llm.workers.on_loss = self._lose
            if (why := llm.why_lost()) is not None:
                self._lose(why)

    @classmethod
    def open(cls, folder: Path | str, config: EngineConfig | None = None) -> AsyncEngine:
        """The engine of a folder."""
        return cls(LLM(folder, config))

    @property
    def info(self) -> ModelInfo:
        return self.llm.info

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    # ---- requests ----------------------------------------------------------------------------

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what add_request would raise for the request itself."""
        self.llm.check(prompt_ids, params)

    def add_request(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str = "",
        deadline_s: float | None = None,
        mask: MaskFactory | None = None,
    ) -> RequestStream:
        """Queue a request.

        Raises: ValueError, TypeError for the request; QueueFullError; DrainingError;
        EngineDeadError.
        """
        prompt_ids = self.llm.encode(prompt)
        self.llm.check(prompt_ids, params)
        if deadline_s is not None and not deadline_s > 0:
            raise bad_value("request", "deadline_s", "be above 0", deadline_s, "leave it out")
        name = request_id or uuid.uuid4().hex
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt_ids),
            params=params,
            salt=salt,
            deadline_s=deadline_s,
            mask=mask,
        )
        max_tokens = self.llm.max_tokens(request)
        arrival_s = time.monotonic()
        with self._condition:
            self._refuse_late(deadline_s)
            self._reserve(name, (len(prompt_ids) + max_tokens) * params.n)
            stream = self._streams[name] = RequestStream(self, name)
            self._commands.append(lambda: self._add(request, max_tokens, arrival_s))
            self._condition.notify()
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request; any thread; False where there is none of that id."""
        with self._condition:
            if request_id not in self._reserved:
                return False
            self._commands.append(lambda: self._abort(request_id))
            self._condition.notify()
        return True

    async def embed(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", pooling: Pooling = "mean"
    ) -> list[list[float]]:
        """Unit vectors of prompts, a step's worth at a time: other requests go on between.
        `salt` is unused, nothing of them is kept. Raises: as add_request.
        """
        del salt
        most = self.llm.config.limits.max_embed_prompts
        if not 1 <= len(prompts) <= most:
            raise bad_value("request", "input", f"hold 1 .. {most} texts", len(prompts), "split it")
        for prompt_ids in prompts:
            self.llm.check_prompt(prompt_ids, room=0)
        name = uuid.uuid4().hex
        with self._condition:
            self._reserve(name, sum(len(prompt_ids) for prompt_ids in prompts))
        vectors: list[list[float]] = []
        try:
            for batch in self.llm.embed_batches(prompts):
                vectors += await self._call(partial(self.llm.embed, batch, pooling))
            return vectors
        finally:
            with self._condition:
                self._release(name)

    # ---- the engine's state ------------------------------------------------------------------

    def health(self) -> Health:
        """Whether it makes progress."""
        now_s = time.monotonic()
        scheduler = self.llm.core.scheduler
        age_s = now_s - self._last_step_s
        oldest_s = self._oldest_arrival_s()
        waiting_s = 0.0 if oldest_s is None else now_s - oldest_s
        stuck = min(age_s, waiting_s) > self.stall_after_s
        state: HealthState = "ready"
        reason = ""
        if self._dead is not None or not self._thread.is_alive():
            state, reason = "dead", self._dead or "the engine's thread ended"
        elif stuck:
            state, reason = "stalled", f"no step ended for {age_s:.0f} s"
        elif self._draining:
            state = "draining"
        elif self._reloading:
            state = "reloading"
        return Health(
            state=state,
            steps=self.llm.counters.steps,
            last_step_age_s=age_s,
            oldest_request_age_s=waiting_s,
            running=len(scheduler.running),
            waiting=max(0, len(self._reserved) - len(scheduler.running)),
            reason=reason,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        scheduler = self.llm.core.scheduler
        return self.llm.counters.snapshot(
            time.monotonic(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=self._reserved_tokens,
            kv_pages_used=scheduler.pool.num_used,
            kv_pages_total=scheduler.pool.num_pages,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            preemptions=scheduler.preemptions,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, wait for what there is; False where requests had to be aborted."""
        self._draining = True
        end_s = time.monotonic() + timeout_s
        while self._reserved and time.monotonic() < end_s and self._dead is None:
            await asyncio.sleep(0.02)
        if not self._reserved:
            return True
        await self._call(self._abort_all)
        return False

    async def reload(self, folder: Path) -> None:
        """Swap the weights between two steps; requests in flight go on under the new ones.

        Raises: ReloadError, UserError: the old weights go on.
        """
        async with self._reload_lock:
            self._reloading = True
            try:
                weights = await self._load_everywhere(folder)
                await self._call(lambda: self.llm.swap(weights))
            finally:
                self._reloading = False

    async def _load_everywhere(self, folder: Path) -> Weights:
        """Every rank loads beside what runs; steps go on. Rank 0's part, once all are ready."""
        llm, loop = self.llm, asyncio.get_running_loop()
        place = str(Path(folder).resolve())
        await self._call(lambda: llm.ask_ranks("load", place))
        try:
            weights = await loop.run_in_executor(None, llm.load_beside, folder)
            while not await self._call(llm.ranks_loaded):
                await asyncio.sleep(0.05)
        except BaseException:
            with contextlib.suppress(EngineDeadError):
                await self._call(lambda: llm.ask_ranks("drop"))
            raise
        return weights

    async def close(self) -> None:
        """Abort everything, end the thread and the other ranks."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        # A thread that waits for a rank that is gone may never end.
        patience_s = None if self._dead is None else 5.0
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._thread.join, patience_s)
        await loop.run_in_executor(None, self.llm.close, self._dead is None)

    # ---- reservations: under the condition ---------------------------------------------------

    def _reserve(self, name: str, tokens: int) -> None:
        if self._dead is not None or self._closing or not self._thread.is_alive():
            raise EngineDeadError(f"engine: {self._dead or 'it is closed'}")
        if self._draining:
            raise DrainingError("engine: it takes no new request; it is being stopped")
        limits = self.llm.config.limits
        if name in self._reserved:
            raise bad_value("request", "request_id", "be new", name, "leave it out")
        full = len(self._reserved) >= limits.max_queue_requests
        # One request larger than the bound is taken when nothing else is there.
        full |= bool(self._reserved) and self._reserved_tokens + tokens > limits.max_queue_tokens
        if full:
            self.llm.counters.rejected()
            raise QueueFullError(
                f"engine: the queue is full ({len(self._reserved)} requests, "
                f"{self._reserved_tokens} tokens); try again later",
                self._retry_after_s(),
            )
        self._reserved[name] = tokens
        self._reserved_tokens += tokens

    def _refuse_late(self, deadline_s: float | None) -> None:
        """A full queue is also one that will outlast the request: it would wait for nothing."""
        rate = self.llm.counters.busy_rate()
        if deadline_s is None or not rate or not self.llm.core.scheduler.waiting:
            return
        wait_s = self._reserved_tokens / rate
        if wait_s > deadline_s:
            self.llm.counters.rejected()
            raise QueueFullError(
                f"engine: {self._reserved_tokens} tokens are to come first, {wait_s:.0f} s at the "
                f"present speed, and the request's time is {deadline_s:g} s; try again later",
                self._retry_after_s(),
            )

    def _release(self, name: str) -> None:
        self._reserved_tokens -= self._reserved.pop(name, 0)

    def _retry_after_s(self) -> float:
        """About how long until a share of the queue is done."""
        rate = self.llm.counters.snapshot(time.monotonic()).tokens_per_s
        share = self._reserved_tokens / max(1, len(self._reserved))
        return min(MAX_RETRY_AFTER_S, max(1.0, share / rate if rate else 1.0))

    def _oldest_arrival_s(self) -> float | None:
        for _ in range(3):
            try:
                return self.llm.core.oldest_arrival_s()
            except RuntimeError:  # the engine's thread changed the table meanwhile
                continue
        return None

    # ---- the engine's thread -----------------------------------------------------------------

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Run something between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def command() -> None:
            try:
                if self._dead is not None:
                    raise EngineDeadError(f"engine: {self._dead}")
                result = work()
            except Exception as error:  # handed to who waits
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._condition:
            if self._dead is not None or self._closing:
                raise EngineDeadError(f"engine: {self._dead or 'it is closed'}")
            self._commands.append(command)
            self._condition.notify()
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        core, failures = self.llm.core, 0
        while True:
            with self._condition:
                while not (self._commands or core.has_work or self._closing or self._dead):
                    self._condition.wait()
                if self._dead is not None:
                    return
                commands = list(self._commands)
                self._commands.clear()
            if self._closing:
                for command in commands:
                    command()
                self._deliver(core.abort_all("abort"))
                return
            try:
                for command in commands:
                    command()
                self._deliver(core.step() if core.has_work else [])
                failures = 0
            except Exception as error:
                failures += 1
                self._fail(error, failures)
                if self._dead is not None:
                    return
            self._last_step_s = time.monotonic()

    def _fail(self, error: Exception, failures: int) -> None:
        """A step raised: its requests end, and after a few in a row the engine."""
        _log.exception("a step of the engine failed")
        core = self.llm.core
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if self._dead is None and (failures >= MAX_FAILURES or self.llm.group is not None):
            self._dead = self.llm.why_lost() or f"steps failed, the last with {why}"
        end = core.abort_running if self._dead is None else core.abort_all
        self._deliver(end("error", f"the engine failed: {why}"))
        core.scheduler.pool.forget_all()
        if self._dead is not None:
            self._forsake()

    def _lose(self, why: str) -> None:
        """A rank is gone, told by who watches it: nothing can be computed any more."""
        with self._condition:
            if self._closing or self._dead is not None:
                return
            self._dead = why
            self._condition.notify()
        _log.critical("the engine ends: %s", why)
        self._forsake()

    def _forsake(self) -> None:
        """Tell everyone who waits that the engine is dead."""
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
            left = list(self._streams.values())
            self._streams.clear()
            self._reserved.clear()
            self._reserved_tokens = 0
        for command in commands:
            command()
        error = EngineDeadError(f"engine: {self._dead}")
        for stream in left:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                stream.loop.call_soon_threadsafe(stream.put, error)

    def _add(self, request: Request, max_tokens: int, arrival_s: float) -> None:
        try:
            self.llm.core.add(request, max_tokens, arrival_s)
        except Exception as error:  # of this request alone: it is told, the others go on
            _log.exception("request %s could not be queued", request.request_id)
            with self._condition:
                stream = self._streams.pop(request.request_id, None)
                self._release(request.request_id)
            if stream is not None:
                with contextlib.suppress(RuntimeError):  # its loop was closed
                    stream.loop.call_soon_threadsafe(stream.put, error)

    def _abort(self, request_id: str) -> None:
        output = self.llm.core.abort(request_id)
        self._deliver([] if output is None else [output])

    def _abort_all(self) -> None:
        self._deliver(self.llm.core.abort_all("abort"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """One call of each loop with everything for it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        with self._condition:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if output.finished:
                    self._streams.pop(output.request_id, None)
                    self._release(output.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop was closed: nobody waits any more
                continue


def _put_all(pairs: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)
