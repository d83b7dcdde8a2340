"""Which format a folder is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.core.errors import UserError
from ridgeline.formats.registry import detect

ENTRY = {"bits": 4, "group_size": 64, "sym": True}


def test_plain_checkpoint(tmp_path: Path) -> None:
    assert detect({"model_type": "llama"}, tmp_path) is None


def test_config_json_comes_first(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps(ENTRY | {"bits": 8}))
    found = detect({"quantization_config": ENTRY | {"quant_method": "gptq"}}, tmp_path)
    assert found is not None and found.layout.bits == 4


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_side_files_of_older_writers(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(ENTRY))
    found = detect({"model_type": "llama"}, tmp_path)
    assert found is not None and found.layout.group_size == 64


def test_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="quant_method must be one of gptq.*, got 'bitsandbytes'"):
        detect({"quantization_config": {"quant_method": "bitsandbytes"}})


def test_damaged_side_file(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(UserError, match="could not read .*quantize_config.json"):
        detect({}, tmp_path)
