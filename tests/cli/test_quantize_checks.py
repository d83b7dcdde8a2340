"""What `ridgeline quantize` refuses before PyTorch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli import main as cli
from ridgeline.core import env

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import json, sys
from ridgeline.cli import main
for words in json.loads(sys.argv[1]):
    print(main.main(["quantize", *words]), file=sys.stderr)
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that looks like a model from outside."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_refusals_without_torch(model, tmp_path) -> None:
    """Each in the project's form, with its exit code, and nothing heavy was imported."""
    (tmp_path / "taken").mkdir()
    packed, empty = tmp_path / "packed", tmp_path / "empty"
    for folder, config in ((packed, {"quantization_config": {"quant_method": "awq"}}), (empty, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    base = ["--model", str(model), "--out", str(tmp_path / "out")]

    def other(folder: Path) -> list[str]:
        return ["--model", str(folder), "--out", str(tmp_path / "out")]

    cases = [
        (other(tmp_path / "nowhere"), 1, "model {t}/nowhere must be a folder, got none"),
        (other(tmp_path), 1, "model {t} must hold config.json, got none"),
        (other(packed), 1, "{t}/packed must hold plain weights, got awq weights"),
        (other(empty), 1, "model {t}/empty must hold *.safetensors, got none"),
        (["--model", str(model), "--out", str(tmp_path / "taken")], 1, "{t}/taken exists; choose"),
        ([*base, "--text", "nope.txt"], 1, "text nope.txt must be a file, got none"),
        ([*base, "--held-out", str(tmp_path)], 1, "--held-out {t} must be a file, got a folder"),
        ([*base], 2, "--group-size must divide the 576 inputs of self_attn.q_proj, got 128"),
        ([*base, "--group-size", "0"], 2, "--group-size must be at least 1, got 0"),
        ([*base, "--damp", "7"], 2, "gptq: --damp must lie in (0, 1], got 7.0"),
        ([*base, "--override", "x=y"], 2, "override must be PATTERN=bits:N,group:N"),
        (
            [*base, "--skip", "("],
            2,
            "a pattern of --skip or --override must be a reg",
        ),
        ([*base, "--format", "awq", "--bits", "3"], 2, "bits must be 4 in awq, got 3"),
        ([*base, "--sequences", "0"], 2, "sequences must be at least 1, got 0"),
        ([*base, "--bits", "5"], 2, "bits"),
    ]
    words = json.dumps([words for words, _, _ in cases])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, words], cwd=ROOT, capture_output=True, text=True,
        env=env.child_environment(PYTHONPATH=str(ROOT)), check=True,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(cases), done.stderr
    for (_, code, part), said, got in zip(cases, lines[::2], lines[1::2], strict=True):
        assert said.startswith("ridgeline: ") and part.format(t=tmp_path) in said, said
        assert int(got) == code, said


def test_an_exception_may_be_what_makes_it_fit(model, tmp_path, capsys) -> None:
    """With --skip the widths are left to the tensors, which are not there."""
    words = ["quantize", "--model", str(model), "--out", str(tmp_path / "out"), "--skip", "q_proj"]
    assert cli.main(words) != 0
    assert "group_size" not in capsys.readouterr().err
