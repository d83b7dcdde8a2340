"""A real server on loopback over an engine without a model, and the official client for it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from ridgeline.engine.server.config import ServerConfig
from ridgeline.engine.server.listen import address_of, bind
from ridgeline.engine.server.run import serve
from ridgeline.engine.server.state import ServerState
from ridgeline.train.tokens import byte_tokenizer

from .fake import FakeEngine

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A tokenizer of bytes with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, text in byte_tokenizer().files().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@dataclass
class Running:
    """A server that runs in a thread of its own."""

    engine: Any
    address: str
    state: ServerState
    loop: asyncio.AbstractEventLoop
    stop: Callable[[], bool]
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.port = int(self.address.rsplit(":", 1)[1])

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None,
        headers: dict[str, str] | None = None, timeout: float = 120.0,
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """One request over a connection of its own: status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Status and JSON of one request."""
        status, _, data = self.ask(path, body, **more)
        return status, json.loads(data)


@contextlib.contextmanager
def running(engine: Any, config: ServerConfig, folder: Path | None = None) -> Iterator[Running]:
    """Serve an engine in a thread until the block ends; the thread must end well."""
    bound = bind("127.0.0.1", config.port)
    began = threading.Event()
    shared: dict[str, Any] = {}

    def ready(state: ServerState) -> None:
        shared["state"], shared["loop"] = state, asyncio.get_running_loop()
        began.set()

    async def main() -> bool:
        shared["stop"] = asyncio.Event()
        return await serve(engine, config, bound, folder=folder, ready=ready, stop=shared["stop"])

    def run() -> None:
        try:
            shared["result"] = asyncio.run(main())
        except BaseException as error:
            shared["error"] = error
            began.set()

    thread = threading.Thread(target=run)
    thread.start()

    def stop() -> bool:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):
                shared["loop"].call_soon_threadsafe(shared["stop"].set)
        thread.join(timeout=180)
        assert not thread.is_alive(), "the server did not end"
        if "error" in shared:
            raise shared["error"]
        return shared["result"]

    assert began.wait(120)
    if "error" in shared:
        raise shared["error"]
    try:
        yield Running(engine, address_of(bound), shared["state"], shared["loop"], stop)
    finally:
        stop()


CONFIG = ServerConfig(port=0, model_name="echo", drain_s=120.0, dead_s=600.0)


@pytest.fixture(scope="module")
def shared(tokenizer_folder) -> Iterator[Running]:
    """A server with the defaults, one a file of tests: use `server`."""
    with running(FakeEngine(tokenizer_folder), CONFIG) as started:
        yield started


@pytest.fixture
def server(shared) -> Iterator[Running]:
    """That server, its engine as new; nothing may be left running after the test."""
    shared.engine.reset()
    yield shared
    until(lambda: not shared.engine.running, "a request is still at the engine")
    until(lambda: shared.state.counters.inside == 0, "a request is still inside")


def until(holds: Callable[[], bool], otherwise: str, seconds: float = 120.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.005)


@pytest.fixture
def engine(server) -> FakeEngine:
    return server.engine


@pytest.fixture(scope="module")
def official(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.address}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def client(server, official) -> openai.OpenAI:
    """The official client of that server."""
    return official
