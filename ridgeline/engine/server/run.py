"""Runs the application under uvicorn: a bound socket, signals, a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from ridgeline.core.errors import UserError
from ridgeline.engine.client import EngineClient
from ridgeline.engine.server.app import build_app
from ridgeline.engine.server.config import ServerConfig
from ridgeline.engine.server.protocol import bounded_protocol
from ridgeline.engine.server.reload import watch
from ridgeline.engine.server.state import ServerState, log


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains the engine first."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


async def serve(
    engine: EngineClient,
    config: ServerConfig,
    bound: socket.socket,
    *,
    folder: Path | None = None,
    ready: Callable[[ServerState], None] | None = None,
    stop: asyncio.Event | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT, or until `stop` is set; then let requests finish.

    A second signal ends at once. Returns True where every request had its end.
    Raises: UserError where the engine died: whoever keeps the server up starts it anew.
    """
    app, state = build_app(engine, config, folder=folder)
    server = _Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(config.header_timeout_s, config.max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=config.max_header_bytes,
        )
    )
    stopping, hurry = stop or asyncio.Event(), asyncio.Event()
    with _signals(stopping, hurry):
        tasks = [asyncio.ensure_future(server.serve(sockets=[bound]))]
        if config.watch is not None:
            tasks.append(asyncio.ensure_future(watch(state, config.watch)))
        waiting = asyncio.ensure_future(stopping.wait())
        dying = asyncio.ensure_future(_death(engine, config.dead_s))
        try:
            while not server.started and not tasks[0].done():
                await asyncio.sleep(0.005)
            if ready is not None:
                ready(state)
            awaited = {tasks[0], waiting, dying}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            finished = await _drain(engine, state, hurry)
            server.should_exit = True
            server.force_exit = hurry.is_set()
            server.config.timeout_graceful_shutdown = 5
            await tasks[0]
        finally:
            why = engine.health().reason if engine.health().state == "dead" else None
            for task in (*tasks[1:], waiting, dying):
                task.cancel()
            await asyncio.wait({*tasks, waiting, dying})
            await state.close()
            await engine.close()
    if why is not None:
        raise UserError(f"serve: the engine died: {why}; start the server again")
    return finished


async def _death(engine: EngineClient, told_s: float) -> None:
    """Until the engine has been dead for so long: its clients are told meanwhile."""
    loop = asyncio.get_running_loop()
    since: float | None = None
    while since is None or loop.time() - since < told_s:
        await asyncio.sleep(min(0.25, told_s))
        health = engine.health()
        if health.state != "dead":
            since = None
        elif since is None:
            since = loop.time()
            log.critical("the engine died: %s", health.reason)


async def _drain(engine: EngineClient, state: ServerState, hurry: asyncio.Event) -> bool:
    """Take nothing new, and wait for what is inside, readers included."""
    state.draining = True
    log.info("draining: %d requests inside", state.counters.inside)
    loop = asyncio.get_running_loop()
    end = loop.time() + state.config.drain_s
    drained = asyncio.ensure_future(engine.drain(state.config.drain_s))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    while state.counters.inside and loop.time() < end and not hurry.is_set():
        await asyncio.sleep(0.01)
    for task in (drained, hurried):
        task.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)
    finished = drained.done() and not drained.cancelled() and drained.result()
    return finished and not state.counters.inside


@contextlib.contextmanager
def _signals(stopping: asyncio.Event, hurry: asyncio.Event):
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    added = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, on_signal)
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


def quiet_libraries() -> None:
    """uvicorn's own lines only where something is wrong."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
