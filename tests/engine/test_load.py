"""Folders become models in the dtype and on the device asked for (figures: tests/cli)."""

from __future__ import annotations

import json

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.engine.llm import LLM
from ridgeline.engine.load import choose_device, choose_dtype, open_model
from ridgeline.engine.params import SamplingParams
from tests.engine.conftest import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_auto_dtype_follows_the_device():
    assert choose_dtype("auto", torch.device("cpu")) == "float32"
    assert choose_dtype("auto", torch.device("cuda")) == "bfloat16"
    assert choose_dtype("float16", torch.device("cpu")) == "float16"


def test_a_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA device is usable here; use --device cpu"):
        choose_device("cuda")


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="must be a folder, got none"):
        open_model(tmp_path / "nothing")
    (tmp_path / "text.txt").write_text("a file")
    with pytest.raises(UserError, match="must be a folder, got a file"):
        open_model(tmp_path / "text.txt")
    with pytest.raises(UserError, match="must be a model folder with a config.json, got none"):
        open_model(tmp_path)


def test_a_hostile_config_runs_nothing(tmp_path):
    """CVE-2025-66448, CVE-2026-4372: a checkpoint names code to run, or a kernel to fetch."""
    folder = write_model(tmp_path / "m")
    want = LLM(folder).generate([[1, 2, 3]], GREEDY)[0].choices[0].token_ids
    marker = tmp_path / "ran"
    for name in ("modeling.py", "kernels.py", "__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    named = {"_attn_implementation": "evil/kernels", "attn_implementation": "evil/kernels"}
    (folder / "config.json").write_text(json.dumps({**config, **named}))
    assert LLM(folder).generate([[1, 2, 3]], GREEDY)[0].choices[0].token_ids == want
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="auto_map must be absent"):
        LLM(folder)
    assert not marker.exists()
