"""Starting, draining, reloading: no request in flight is lost."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.errors import UserError
from ridgeline.engine.errors import ReloadError
from ridgeline.engine.server.config import ServerConfig, is_loopback
from ridgeline.engine.server.listen import bind

from .conftest import CONFIG, running, until
from .fake import FakeEngine

LONG = {"model": "echo", "prompt": "go", "max_tokens": 60, "stream": True}


class _Stream:
    """A streamed request that has its first bytes."""

    def __init__(self, port: int, body: dict) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        kind = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), kind)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def text(self) -> str:
        """The rest, to its end."""
        found = self._answer.read().decode()
        self._connection.close()
        return found


def test_a_stop_lets_requests_finish(tokenizer_folder):
    engine = FakeEngine(tokenizer_folder, tokens_per_s=100)
    engine.script = [65] * 1000
    with running(engine, CONFIG) as started:
        stream = _Stream(started.port, LONG)
        results: list[bool] = []
        stopping = threading.Thread(target=lambda: results.append(started.stop()))
        stopping.start()
        until(lambda: started.state.draining, "it does not drain")
        status, health = started.json("/health")
        assert (status, health["status"]) == (503, "draining")
        status, headers, data = started.ask("/v1/completions", LONG)
        assert (status, json.loads(data)["error"]["code"]) == (503, "draining")
        assert headers["retry-after"] == "5"
        text = stream.text()
        assert text.endswith("data: [DONE]\n\n") and text.count('"text":"A"') == 60
        stopping.join(120)
        assert results == [True] and engine.closed


def test_what_does_not_finish_in_time_is_ended(tokenizer_folder):
    engine = FakeEngine(tokenizer_folder, tokens_per_s=50)
    engine.script = [65] * 100_000
    with running(engine, replace(CONFIG, drain_s=0.3)) as started:
        stream = _Stream(started.port, {**LONG, "max_tokens": 4000})
        began = time.monotonic()
        assert started.stop() is False and time.monotonic() - began < 60
        assert '"code":"aborted"' in stream.text() and engine.running == {}


def test_a_dead_engine_ends_the_server_with_the_reason(tokenizer_folder):
    engine = FakeEngine(tokenizer_folder)
    with (
        pytest.raises(UserError, match="serve: the engine died: its thread ended; start"),
        running(engine, replace(CONFIG, dead_s=0.1)) as started,
    ):
        engine.dead = True
        until(lambda: engine.closed, "the server goes on")
        started.stop()


def test_a_port_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127.0.0.1 must be free, got one in"):
            bind("127.0.0.1", port)
    with pytest.raises(UserError, match="host nowhere.invalid must be an address"):
        bind("nowhere.invalid", 0)
    with pytest.raises(UserError, match=r"could not listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_loopback():
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("[::1]")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    assert ServerConfig().loopback


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"port": 70000}, "port must lie in 0 .. 65535"),
        ({"api_keys": ("short",)}, "api_keys must have at least 8 characters"),
        ({"deadline_s": 0}, "deadline_s must be above 0"),
        ({"max_requests": 0}, "max_requests must be at least 1"),
        ({"model_name": ""}, "model_name must have 1 .. 200 characters"),
        ({"max_header_bytes": 3}, "max_header_bytes must be at least 1024"),
    ],
)
def test_a_config_is_checked(change, part):
    with pytest.raises(ValueError, match=part):
        ServerConfig(**change)


@pytest.fixture
def checkpoints(tmp_path):
    """Three folders that look like models and one that does not."""
    for name in ("step-1", "step-2", "step-3"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"x")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("{}")
    return tmp_path / "runs"


def test_reload_goes_on_under_load(tokenizer_folder, checkpoints):
    engine = FakeEngine(tokenizer_folder, tokens_per_s=200)
    engine.script = [65] * 1000
    config = replace(CONFIG, reload_root=checkpoints)
    with running(engine, config, folder=checkpoints / "step-1") as started:
        streams = [_Stream(started.port, LONG) for _ in range(4)]
        assert started.json("/admin/reload", {"folder": "step-2"}) == (
            200, {"status": "reloaded", "folder": "step-2", "reloads": 1},
        )  # fmt: skip
        assert started.json("/admin/reload", {})[0] == 200
        assert [path.name for path in engine.reloaded] == ["step-2", "step-1"]
        for stream in streams:
            text = stream.text()
            assert text.endswith("data: [DONE]\n\n") and text.count('"text":"A"') == 60


def test_reloads_that_are_refused(tokenizer_folder, checkpoints):
    engine = FakeEngine(tokenizer_folder)
    config = replace(CONFIG, reload_root=checkpoints)
    with running(engine, config, checkpoints / "step-1") as started:
        for name in ("../secret", "/etc", "nothing", ".", "", 3, "step-1/../../secret", "a\0b"):
            status, answer = started.json("/admin/reload", {"folder": name})
            assert (status, answer["error"]["param"]) == (400, "folder"), name
        assert started.json("/admin/reload", {"path": "x"})[0] == 400
        assert started.json("/admin/reload", [])[0] == 400
        status, answer = started.json("/admin/reload", {"folder": "notes"})
        assert (status, answer["error"]["code"]) == (409, "reload_refused")
        engine.reload_error = ReloadError("reload: layers must be 2, got 3; serve it anew")
        status, answer = started.json("/admin/reload", {"folder": "step-1"})
        assert status == 409 and "layers must be 2" in answer["error"]["message"]
        engine.reload_error, engine.reload_s = None, 0.5
        first = threading.Thread(target=lambda: started.json("/admin/reload", {}))
        first.start()
        until(lambda: started.state.reload_lock.locked(), "the reload does not start")
        assert started.json("/admin/reload", {})[1]["error"]["code"] == "reloading"
        first.join()
        assert started.json("/health")[0] == 200


def test_a_watched_folder(tokenizer_folder, checkpoints):
    engine = FakeEngine(tokenizer_folder)
    config = replace(CONFIG, watch=checkpoints, watch_every_s=0.05)
    with running(engine, config, checkpoints / "step-1") as started:
        time.sleep(0.2)
        assert engine.reloaded == []  # what was there before is not new
        made = checkpoints / ".step-4.tmp"
        made.mkdir()
        (made / "config.json").write_text("{}")
        (made / "model.safetensors").write_bytes(b"y")
        time.sleep(0.2)
        assert engine.reloaded == []
        made.rename(checkpoints / "step-4")
        until(lambda: [p.name for p in engine.reloaded] == ["step-4"], "it is not loaded")
        engine.reload_error = ReloadError("reload: no")
        (checkpoints / "step-2" / "model.safetensors").write_bytes(b"changed")
        time.sleep(0.3)
        assert started.json("/health")[0] == 200
        engine.reload_error = None
        (checkpoints / "step-3" / "model.safetensors").write_bytes(b"changed too")
        until(lambda: engine.reloaded[-1].name == "step-3", "the next one is not loaded")


def test_a_watched_folder_is_not_given_up(tokenizer_folder, checkpoints):
    """A reload that was under way, or one that broke: the folder, or the next one, is loaded."""
    engine = FakeEngine(tokenizer_folder)
    config = replace(CONFIG, watch=checkpoints, watch_every_s=0.02)

    def change(name: str) -> None:
        (checkpoints / name / "model.safetensors").write_bytes(name.encode() * 9)

    with running(engine, config, checkpoints / "step-1") as started:
        started.ask("/health")
        engine.reload_s = 1.0
        first = threading.Thread(target=lambda: started.json("/admin/reload", {}))
        first.start()
        until(lambda: started.state.reload_lock.locked(), "the reload does not start")
        change("step-2")
        first.join()
        engine.reload_s = 0.0
        until(lambda: engine.reloaded[-1].name == "step-2", "it is not loaded afterwards")
        broken: list[Path] = []

        async def fail(folder: Path) -> None:
            broken.append(folder)
            raise RuntimeError("a kernel failed")

        working, engine.reload = engine.reload, fail
        change("step-3")
        until(lambda: bool(broken), "it is not tried")
        engine.reload = working
        change("step-1")
        until(lambda: engine.reloaded[-1].name == "step-1", "nobody watches any more")


def test_the_time_of_a_request_begins_with_its_plan(tokenizer_folder, monkeypatch):
    """Waiting for a template's or a grammar's turn is part of its deadline."""
    engine = FakeEngine(tokenizer_folder)

    async def slow(*asked, **more):
        await asyncio.sleep(60)

    with running(engine, CONFIG) as started:
        monkeypatch.setattr(started.state.render_worker, "run", slow)
        body = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
        status, answer = started.json("/v1/chat/completions", {**body, "deadline_s": 0.1})
        assert (status, answer["error"]["param"]) == (408, "deadline_s")
        assert engine.seen == [] and started.state.counters.inside == 0
