"""What keeps a server up: keys, bounds, overload, clients that leave, and each class of CVE that
the serving engines of this field have had."""

from __future__ import annotations

import ast
import asyncio
import base64
import http.client
import json
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import ridgeline.engine.server
from ridgeline.engine.server.app import ROUTES
from ridgeline.engine.server.grammar import GrammarCompiler
from ridgeline.engine.server.jobs import JobTimeoutError, Worker

from .conftest import CONFIG, running, until
from .fake import FakeEngine

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": "echo", "prompt": "go", "max_tokens": 4000, "stream": True}
KEY = "a-long-secret-key"


def _raw(port: int, data: bytes, seconds: float = 20.0) -> bytes:
    """What comes back for these bytes until the connection ends or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        try:
            while piece := connection.recv(65536):
                found += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def _open(port: int, body: dict) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    """A streamed request that has its first bytes, and its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    return answer, connection


@pytest.fixture
def slow(engine):
    """Requests that take their time, and say something forever."""
    engine.tokens_per_s = 100
    engine.script = [65] * 100_000
    return engine


# Keys (CVE-2025-59425: compared byte by byte; routes left open)


@pytest.fixture(scope="module")
def locked(tokenizer_folder):
    config = replace(CONFIG, api_keys=(KEY, "another-long-key"))
    with running(FakeEngine(tokenizer_folder), config) as started:
        yield started


@pytest.mark.parametrize("path", [*ROUTES, "/nowhere", "/v1/models/echo", "/docs"])
def test_every_route_but_health_needs_the_key(locked, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {KEY}x"}):
        for method in ("GET", "POST", "DELETE"):
            status, back, _ = locked.ask(path, b"{}", method=method, headers=headers)
            if path == "/health":
                assert status in (200, 405)
            else:
                assert status == 401 and "www-authenticate" in back


def test_the_key_opens(locked):
    for key in (KEY, "another-long-key"):
        headers = {"Authorization": f"Bearer {key}"}
        assert (
            locked.json("/v1/completions", {"model": "echo", "prompt": "a"}, headers=headers)[0]
            == 200
        )
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    assert locked.ask("/", headers={"Authorization": f"Basic {basic}"})[0] == 200
    salts = {salt for _, _, salt, _ in locked.engine.seen}
    assert len(salts) == 2 and all(len(salt) == 64 for salt in salts)  # no cache between keys


def test_keys_are_compared_in_constant_time():
    source = (Path(ridgeline.engine.server.__file__).parent / "guard.py").read_text()
    nodes = list(ast.walk(ast.parse(source)))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert calls.count("hmac.compare_digest") == 1
    compared = [ast.unparse(node) for node in nodes if isinstance(node, ast.Compare)]
    assert not [text for text in compared if re.search(r"\b(key|keys|given)\b", text)]


# Pages of other sites


def test_another_sites_page_is_refused(server):
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "http://["},
        {"Host": "evil.example"},
    ):
        assert server.json("/v1/models", headers=headers)[0] == 403
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.json("/v1/models", headers=own)[0] == 200
    plain = server.ask("/v1/completions", b"{}", headers={"Content-Type": "text/plain"})
    assert plain[0] == 415


# Bodies and headers (CVE-2025-48956: one huge header)


def test_body_limits(server):
    big = b'{"model": "' + b"x" * (5 * 2**20) + b'"}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(big)}\r\n\r\n"
    )
    assert b" 413 " in _raw(server.port, head.encode() + big[:1000]).split(b"\r\n")[0]
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"100000\r\n" + b"[" * 0x100000 + b"\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(chunked)
        try:
            for _ in range(5):
                connection.sendall(b"100000\r\n" + b"[" * 0x100000 + b"\r\n")
        except OSError:
            pass  # closed while we were still sending
        try:
            assert b" 413 " in connection.recv(65536)
        except ConnectionResetError:
            pass
    assert server.json("/health")[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"NaN", b'{"model": NaN}', b"[" * 5000,
        b'{"a":' * 200 + b"1" + b"}" * 200, b"1" * 5000, b'{"model": "\\ud800"}',
        b'{"model": "echo", "prompt": "\\udfff"}', b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_what_is_not_json_is_a_400(server, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
        status, answer = server.json(path, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_header_limits(server):
    huge = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 200_000
    first = _raw(server.port, huge)
    assert first == b"" or b" 400 " in first.split(b"\r\n")[0]
    status, answer = server.json("/v1/models", headers={"X-A": "a" * 20_000})
    assert (status, answer["error"]["code"]) == (431, "headers_too_large")
    many = b"".join(b"X-%d: a\r\n" % i for i in range(5000))
    first = _raw(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")
    assert first == b"" or first.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert server.json("/health")[0] == 200


def test_garbage_on_the_port(server):
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"PRI * HT",
    ):
        _raw(server.port, data + b"\r\n\r\n", seconds=0.3)
    assert server.json("/health")[0] == 200


def test_slow_headers_and_bodies_are_ended(tokenizer_folder):
    config = replace(CONFIG, header_timeout_s=2.0, body_timeout_s=0.5)
    with running(FakeEngine(tokenizer_folder), config) as started:
        began = time.monotonic()
        assert _raw(started.port, b"GET /health HTTP/1.1\r\nHost: ") == b""
        assert time.monotonic() - began < 19  # not the client's own limit
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        assert b" 408 " in _raw(started.port, head).split(b"\r\n")[0]


def test_connections_are_bounded(tokenizer_folder):
    with running(FakeEngine(tokenizer_folder), replace(CONFIG, max_connections=2)) as started:
        held = [socket.create_connection(("127.0.0.1", started.port)) for _ in range(2)]
        back = _raw(started.port, b"")
        assert back.startswith(b"HTTP/1.1 429 ") and b"Retry-After" in back
        head, _, body = back.partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head and json.loads(body)
        for each in held:
            each.close()
        until(lambda: b"HTTP/1.1 200" in _raw(
            started.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        ), "no room after the others left")  # fmt: skip


# Overload


def test_a_full_queue_is_a_429(server, slow):
    slow.capacity = 2
    streams = [_open(server.port, LONG) for _ in range(2)]
    status, headers, data = server.ask("/v1/completions", LONG)
    error = json.loads(data)["error"]
    assert (status, error["code"], headers["retry-after"]) == (429, "queue_full", "2")
    assert server.json("/v1/chat/completions", CHAT)[0] == 429
    for stream, connection in streams:
        stream.close()
        connection.close()
    until(lambda: not slow.running, "cancelled requests run on")
    slow.script = None
    assert server.json("/v1/completions", {"model": "echo", "prompt": "a"})[0] == 200


def test_requests_inside_are_bounded_before_their_bodies_are_read(tokenizer_folder):
    with running(FakeEngine(tokenizer_folder), replace(CONFIG, max_requests=1)) as started:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", started.port)) as held:
            held.sendall(head)
            until(lambda: started.state.counters.inside == 1, "it did not come in")
            status, headers, _ = started.ask("/v1/completions", b"{}")
            assert status == 429 and int(headers["retry-after"]) >= 1
        until(lambda: started.state.counters.inside == 0, "it did not leave")


def test_several_prompts_are_reserved_together_or_not_at_all(server, slow):
    slow.capacity = 3
    status, _ = server.json("/v1/completions", {"model": "echo", "prompt": ["a"] * 4})
    assert status == 429
    until(lambda: not slow.running, "the first three still run")


# Clients that leave or stall


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, slow, stream):
    before = server.state.counters.client_gone
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps({**LONG, "stream": stream, "n": 2})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    until(lambda: bool(slow.running), "it did not start")
    if stream:
        answer = connection.getresponse()
        assert answer.read(10)
        answer.close()
    connection.close()
    until(lambda: not slow.running, "it runs on")
    until(lambda: server.state.counters.client_gone == before + 1, "it is not counted")
    assert slow.stats().kv_pages_used == 0


def test_a_reader_that_takes_nothing_is_dropped(tokenizer_folder):
    engine = FakeEngine(tokenizer_folder, tokens_per_s=20_000, max_model_len=100_000)
    engine.script = [65] * 1_000_000
    engine.capacity_tokens = 10**9
    with running(engine, replace(CONFIG, write_timeout_s=0.5)) as started:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", started.port))
            body = json.dumps({**LONG, "max_tokens": 90_000, "n": 8, "logprobs": 20}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            until(lambda: started.state.counters.slow_readers == 1, "it is still served")
            until(lambda: not engine.running, "its request runs on")


# Unbounded counts (CVE-2026-34756), placeholder and odd tokens (CVE-2026-44222, CVE-2025-48944)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 10**9}, {"n": 2**70}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 10**9},
        {"max_tokens": 10**18}, {"stop": ["x"] * 10_000}, {"stop": "x" * 10_000},
        {"logit_bias": {str(i): 1 for i in range(1000)}}, {"seed": 2**64}, {"n": 0}, {"n": -1},
        {"messages": [{"role": "user", "content": ""}] * 5000},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "x"}]}, {"tools": [{}] * 200}, {"tools": "x"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "nope", "pattern": "["}}},
            "strict": True}}]},
    ],
)  # fmt: skip
def test_odd_requests_are_refused_and_the_server_goes_on(server, change):
    status, answer = server.json("/v1/chat/completions", {**CHAT, **change})
    assert status == 400, answer
    assert server.json("/v1/chat/completions", CHAT)[0] == 200


# Templates (CVE-2024-34359, CVE-2026-5760) and their arguments (CVE-2025-62426)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools", "messages", "range"])
def test_template_arguments_are_on_a_list(server, name):
    body = {**CHAT, "chat_template_kwargs": {name: True}}
    assert server.json("/v1/chat/completions", body)[0] == 400
    assert server.json("/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"})[0] == 400


def _engine_with(tokenizer_folder: Path, tmp_path: Path, template: str) -> FakeEngine:
    for source in tokenizer_folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return FakeEngine(tmp_path)


HOSTILE = (
    "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in messages %}"
    "{% set x = c.content ~ 'y' %}{% endfor %}{% endfor %}{% endfor %}"
)
ESCAPE = "{{ cycler.__init__.__globals__.os.popen('id').read() }}{{ messages[0].content }}"


def test_a_hostile_template_stops_nobody(tokenizer_folder, tmp_path):
    engine = _engine_with(tokenizer_folder, tmp_path, HOSTILE)
    with running(engine, replace(CONFIG, template_timeout_s=0.5)) as started:
        answers: list[tuple[int, dict]] = []
        asking = threading.Thread(
            target=lambda: answers.append(started.json("/v1/chat/completions", CHAT))
        )
        asking.start()
        others = 0
        while asking.is_alive():
            assert started.json("/health")[0] == 200
            others += 1
        asking.join()
        status, answer = answers[0]
        assert (status, answer["error"]["param"]) == (400, "messages"), answer
        assert "template" in answer["error"]["message"] and others >= 1
        assert started.json("/v1/completions", {"model": "echo", "prompt": "a"})[0] == 200


def test_a_template_reaches_nothing_of_python(tokenizer_folder, tmp_path):
    with running(_engine_with(tokenizer_folder, tmp_path, ESCAPE), CONFIG) as started:
        status, answer = started.json("/v1/chat/completions", CHAT)
        assert status == 400 and "uid=" not in str(answer)


# Grammars (GHSA-389x-67px-mjg3: unbounded cache; blow-ups)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"}, {"$ref": "file:///etc/passwd"},
        {"type": "string", "pattern": "(?=x)"}, {"type": "wrong"},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "string", "enum": ["x" * 70_000]},
        {"type": "string", "pattern": "(" * 500 + "a" + ")" * 500},
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_used(server, schema):
    body = {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, answer = server.json("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"].startswith("response_format"), answer


def test_compiled_grammars_are_bounded(server, monkeypatch):
    monkeypatch.setattr("ridgeline.engine.server.grammar.MAX_CACHED", 3)
    for i in range(6):
        schema = {"type": "integer", "minimum": i, "maximum": i}
        kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, answer = server.json("/v1/chat/completions", {**CHAT, "response_format": kind})
        assert status == 200 and answer["choices"][0]["message"]["content"] == str(i)
    assert len(server.state.grammars._compiled) == 3


def test_requests_with_one_grammar_share_its_compilation(tokenizer_folder):
    """Also where the first of them leaves; the tokenizer is read before, on nobody's time."""

    async def main() -> None:
        path = tokenizer_folder / "tokenizer.json"
        compiler = GrammarCompiler(path, 300, (0,), 5.0)
        jobs: list[str] = []
        run = compiler._worker.run

        async def counted(job, timeout_s, **fields):
            jobs.append(job)
            return await run(job, timeout_s, **fields)

        compiler._worker.run = counted
        grammar = 'start: "a" | "b"'
        asked = [asyncio.ensure_future(compiler.compile(grammar, f"p{i}")) for i in range(5)]
        while not compiler._compiling:
            await asyncio.sleep(0)
        asked[0].cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError) and all(map(callable, done[1:]))
        assert jobs == ["grammar"] and not compiler._compiling
        wrong = [compiler.compile("start: nowhere", f"p{i}") for i in range(2)]
        told = await asyncio.gather(*wrong, return_exceptions=True)
        assert [str(error.param) for error in told] == ["p0", "p1"]
        await compiler.close()

    asyncio.run(main())


def test_a_worker_that_hangs_is_killed_and_comes_back():
    async def main() -> None:
        worker = Worker()
        ok = {"template": "{{ messages[0].role }}", "special_tokens": {}, "tools": None}
        job = {**ok, "messages": [{"role": "user", "content": ""}], "variables": {}}
        assert await worker.run("render", 5.0, **job) == {"text": "user"}
        first = worker._process
        with pytest.raises(JobTimeoutError, match=r"longer than 0.2 seconds"):
            await worker.run("render", 0.2, **{**job, "template": HOSTILE.replace("1000", "990")})
        assert first is not None and first.returncode is not None
        assert await worker.run("render", 5.0, **job) == {"text": "user"}
        await worker.close()

    asyncio.run(main())


# Pickle, torch.load, eval, fetches (CVE-2025-32444, CVE-2025-30165, CVE-2026-7304, CVE-2025-62164,
# CVE-2026-0599): nothing of the kind is there


def test_nothing_is_unpickled_evaluated_or_fetched():
    forbidden = {
        *("pickle", "dill", "cloudpickle", "marshal", "shelve", "urllib.request", "requests"),
        *("httpx", "multiprocessing", "aiohttp", "urllib3"),
    }
    calls = {"eval", "exec", "compile", "torch.load", "__import__", "os.system"}
    for path in (Path(ridgeline.engine.server.__file__).parent).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            assert not forbidden & set(names), path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, path


def test_the_worker_imports_neither_torch_nor_the_server():
    import subprocess
    import sys

    code = (
        "import sys, ridgeline.engine.server.worker\n"
        "heavy = {'torch', 'starlette', 'uvicorn', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Paths (CVE-2026-7302): names are labels


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/x", "//etc/passwd", "/v1/models/..",
     "/page.html", "/v1/../admin/reload", "/V1/models"],
)  # fmt: skip
def test_no_path_leads_out(server, path):
    status, answer = server.json(path)
    assert status == 404 and answer["error"]["code"] in ("not_found", "model_not_found")


def test_wrong_methods(server):
    status, headers, _ = server.ask("/v1/completions", method="GET")
    assert status == 405 and headers["allow"] == "POST"
    assert server.ask("/health", b"{}")[0] == 405
    status, headers, data = server.ask("/health", method="HEAD")
    assert status == 200 and data == b""
