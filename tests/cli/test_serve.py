"""`ridgeline serve` as a process, its errors, and the quickstart's stage, on a tiny model."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.serve import ServeConfig, folder_of, quickstart_folder, read_keys, serve
from ridgeline.cli.stage import Context, QuickstartConfig
from ridgeline.cli.stages import serve as stage
from ridgeline.core.errors import UserError

NO_SPACE = "a-key-of-the-file\n# a comment\n\nanother-key-here\n"


@pytest.fixture(scope="module")
def served(model_folder, tmp_path_factory):
    """A server process on the tiny model with a key, as a user starts it."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(NO_SPACE)
    command = [
        *(sys.executable, "-m", "ridgeline", "serve", str(model_folder), "--port", "0", "--json"),
        *("--api-key-file", str(keys), "--name", "tiny", "--device", "cpu"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = next(e for e in map(json.loads, process.stdout) if e["event"] != "progress")
    yield process, said
    process.kill()
    process.communicate()


def test_it_serves_the_official_client_and_drains(served):
    process, said = served
    assert said["event"] == "serving" and said["info"]["max_model_len"] == 256
    client = openai.OpenAI(base_url=f"{said['url']}/v1", api_key="another-key-here", max_retries=0)
    with client:
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}
        first = client.completions.create(**asked, extra_body={"ignore_eos": True})
        pieces = list(client.completions.create(
            **asked, stream=True, extra_body={"ignore_eos": True}
        ))  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in pieces) == first.choices[0].text
        assert first.usage.completion_tokens == 12
        vector = client.embeddings.create(model="tiny", input="abc").data[0].embedding
        assert abs(sum(x * x for x in vector) - 1) < 1e-4
    with openai.OpenAI(base_url=f"{said['url']}/v1", api_key="wrong", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.models.list()
    process.terminate()
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert last["event"] == "result" and last["drained"] is True
    assert "another-key" not in err


def _run(capsys, *words: str) -> tuple[int, str]:
    code = cli.main(["serve", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_dry_run_says_what_fits(model_folder, capsys):
    code, said = _run(capsys, str(model_folder), "--dry-run", "--device", "cpu")
    assert code == 0
    for word in ("weights", "KV cache", "requests"):
        assert word in said


def test_a_dry_run_of_two_ranks_says_what_each_has(model_folder, capsys):
    words = (str(model_folder), "--dry-run", "--device", "cpu", "--tensor-parallel")
    code, said = _run(capsys, *words, "2")
    assert code == 0 and "ranks        2: each has " in said and "on each rank" in said
    code, said = _run(capsys, *words, "64")
    assert code == 2 and "ranks must divide num_heads" in said


def test_what_cannot_be_served(tmp_path, model_folder, capsys):
    code, said = _run(capsys, str(tmp_path))
    assert code == 1 and "must be a model folder with a config.json" in said
    code, said = _run(capsys, "--model", str(tmp_path / "none"))
    assert code == 1 and "none must be a folder" in said
    code, said = _run(
        capsys, str(model_folder), "--dry-run", "--device", "cpu", "--memory-gib", "0.0001"
    )
    assert code in (1, 2) and "the model must fit in" in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = _run(capsys, str(model_folder), "--port", port)
    assert code == 1 and f"port {port} on 127.0.0.1 must be free" in said


def test_other_machines_need_a_key(monkeypatch, model_folder, capsys):
    code, said = _run(capsys, str(model_folder), "--host", "0.0.0.0")
    assert code == 2 and "host must be this machine's own where no key is set" in said
    assert ServeConfig(host="0.0.0.0", without_key=True).server("m").api_keys == ()
    monkeypatch.setenv("RIDGELINE_API_KEY", "from-the-environment")
    assert ServeConfig(host="0.0.0.0").server("m").api_keys == ("from-the-environment",)


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(NO_SPACE)
    assert read_keys(path) == ("a-key-of-the-file", "another-key-here")
    path.write_text("# nothing\n")
    with pytest.raises(UserError, match="must hold a key a line"):
        read_keys(path)
    with pytest.raises(UserError, match="could not read the keys"):
        read_keys(tmp_path / "none")


def test_the_quickstarts_model_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    made = tmp_path / "quickstart" / "smollm2-135m-gptq-w4g64"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    assert quickstart_folder() == made == folder_of("quickstart")
    assert folder_of("some/where") == Path("some/where")


def test_without_a_quickstart_weights_are_rounded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    made = []

    def quantized(config):
        made.append(config)
        config.out.mkdir(parents=True)
        (config.out / "config.json").write_text("{}")

    monkeypatch.setattr("ridgeline.cli.rounded.quantize", quantized)
    monkeypatch.setattr("ridgeline.cli.rounded.model_folder", lambda: tmp_path / "source")
    assert quickstart_folder() == quickstart_folder() == made[0].out
    assert len(made) == 1 and made[0].method == "rtn" and made[0].bits == 4


def test_the_quickstarts_stage(model_folder, tmp_path, monkeypatch):
    """The stage with and without the official client, on one server."""
    monkeypatch.setattr(stage, "FLAGS", ("--port", "0", "--name", stage.NAME, "--json"))
    config = QuickstartConfig(out=tmp_path, device="cpu", prompt="hi", max_new_tokens=6)
    context = Context(config=config, folder=tmp_path, device="cpu")
    context.results["quantize"] = {"folder": str(model_folder)}
    with stage.running(str(model_folder), "cpu") as url:
        monkeypatch.setattr(stage, "running", lambda *_: contextlib.nullcontext(url))
        official = stage.run(context)
        monkeypatch.setattr(stage.importlib.util, "find_spec", lambda name: None)
        plain = stage.run(context)
    assert official["client"] == f"openai {openai.__version__}"
    assert plain["client"].startswith("plain HTTP")
    for result in (official, plain):
        assert 1 <= result["new_tokens"] <= 6 and result["ready_s"] >= 0
        assert str(result["new_tokens"]) in stage.say(result)
        assert stage.section(result, context).quote == result["text"]
    assert official["text"] == plain["text"]


@pytest.mark.parametrize("flag", ["watch", "reload_root"])
def test_a_folder_that_is_not_there_is_refused(flag, model_folder, tmp_path):
    """A word mistyped would never load anything."""
    config = ServeConfig(model=str(model_folder), port=0, **{flag: tmp_path / "nowhere"})
    with pytest.raises(UserError, match=f"serve: {flag} must be a folder, got .*nowhere; make"):
        serve(config)


@pytest.mark.parametrize(
    ("lines", "code", "part"),
    [
        ('{"event": "error", "message": "no such folder"}', 1, "did not start: no such folder"),
        ('{"event": "progress"}', 3, "ended with exit code 3 as it started"),
        ('{"event": "serving", "url": "x"}', 4, "the server did not stop well"),
    ],
)
def test_a_server_that_fails_is_said(tmp_path, monkeypatch, lines, code, part):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho '{lines}'\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(stage.sys, "executable", str(script))
    with pytest.raises(UserError, match=part):
        with stage.running(str(tmp_path), "cpu"):
            pass


def test_serving_imports_nothing_of_quantizing_or_drawing():
    code = (
        "import sys, ridgeline.cli.serve_work\n"
        "heavy = {'matplotlib', 'gguf', 'transformers', 'triton', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
