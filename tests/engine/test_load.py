"""Folders become models in the dtype and on the device asked for (figures: tests/cli)."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.engine.load import choose_device, choose_dtype, open_model


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
