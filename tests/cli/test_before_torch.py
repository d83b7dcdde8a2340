"""What `eval`, `generate`, `convert`, `serve` and `train` refuse before PyTorch is imported."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from ridgeline.core import env

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import json, sys
from ridgeline.cli import main
for words in json.loads(sys.argv[1]):
    print(main.main(words), file=sys.stderr)
heavy = {"torch", "transformers", "numpy", "tokenizers", "uvicorn"} & set(sys.modules)
assert not heavy, heavy
"""


def test_refusals_without_torch(tmp_path) -> None:
    """Each in one line with its exit code, and nothing heavy was imported."""
    model, text, other = tmp_path / "model", tmp_path / "text.txt", tmp_path / "other.gguf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    text.write_text("some words")
    other.write_bytes(b"PK")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF....")
    out = ["--out", str(tmp_path / "out")]
    source = ["convert", "--source", str(model)]
    score = ["eval", "--text", str(text), "--model"]
    answer = ["generate", "--prompt", "hi", "--model"]
    serve = ["serve", str(model), "--port", "0"]
    train = ["train", "--data.files", str(text)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            ([*score, "model"], 1, "eval: --model model must be a folder, got none"),
            ([*score, str(text)], 1, "text.txt must be a folder, got a file"),
            ([*score, str(tmp_path)], 1, "must be a model folder with a config.json, got none"),
            (["eval", "--model", str(model), "--text", "none.txt"], 1, "could not read none.txt"),
            ([*score, str(model), "--window", "1"], 2, "window must be at least 2, got 1"),
            ([*score, str(model), "--device", "tpu"], 2, "--device must be one of auto, cpu, cuda"),
            ([*answer, "nowhere"], 1, "nowhere must be a folder, got none"),
            ([*answer, str(tmp_path)], 1, "must be a model folder with a config.json, got none"),
            ([*answer, str(model), "--top-p", "2"], 2, "must lie in (0, 1], got 2.0"),
            ([*answer, str(model), "--no-chat", "--system", "x"], 2, "be empty without a chat"),
            (["convert", "--source", "nowhere", *out], 1, "must exist, got nowhere"),
            (["convert", "--source", str(other), *out], 1, "must be a GGUF file or a folder"),
            (["convert", "--source", str(tmp_path), *out], 1, "must be a model folder with a"),
            (["convert", "--source", str(gguf), *out, "--format", "awq"], 1, "got a GGUF file;"),
            ([*source, "--out", str(model)], 1, "model exists; choose another or pass --overwrite"),
            ([*source, *out, "--lossy"], 2, "lossy must come with a format"),
            (["serve", "nowhere"], 1, "serve: --model nowhere must be a folder, got none"),
            ([*serve, "--max-num-seqs", "0"], 2, "must be a whole number >= 1, got 0"),
            ([*serve, "--watch", "nowhere"], 1, "must be a folder, got nowhere"),
            ([*serve, "--api-key-file", "none"], 1, "could not read the keys in none"),
            ([*serve[:2], "--port", port], 1, f"port {port} on 127.0.0.1 must be free"),
            ([*train, "--model.preset", "nope"], 2, "preset must be one of tiny, small, medium"),
            ([*serve[:2], "--port", "70000"], 2, "port must lie in 0 .. 65535, got 70000"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, json.dumps([words for words, _, _ in cases])],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env=env.child_environment(PYTHONPATH=str(ROOT)),
        )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 2 * len(cases), done.stderr
    for (words, code, part), said, got in zip(cases, lines[::2], lines[1::2], strict=True):
        assert said.startswith("ridgeline: ") and part in said, (words, said)
        assert int(got) == code, (words, got)
