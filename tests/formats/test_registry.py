"""Which format a folder is in."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import UserError
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.registry import describe, detect

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


AWQ = {"w_bit": 4, "q_group_size": 128, "zero_point": True}
CT = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}


@pytest.mark.parametrize(
    ("entry", "method"),
    [
        (ENTRY, "gptq"),
        (ENTRY | {"quant_method": "GPTQ"}, "gptq"),
        (ENTRY | {"version": "gptq_v2", "zero_point": True}, "gptq"),
        (AWQ, "awq"),
        (AWQ | {"version": "GEMV"}, "awq"),
        (AWQ | {"quant_method": "awq"}, "awq"),
        (CT, "compressed-tensors"),
        (CT | {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        (CT | {"quant_method": "sparseml"}, "compressed-tensors"),
    ],
)
def test_the_method_is_stated_or_told_by_its_keys(tmp_path: Path, entry: dict, method: str) -> None:
    found = detect({"quantization_config": entry})
    assert found is not None and found.layout.method == method
    (tmp_path / "quant_config.json").write_text(json.dumps(entry))
    found = detect({}, tmp_path)
    assert found is not None and found.layout.method == method


def test_the_older_key_of_compressed_tensors() -> None:
    found = detect({"compression_config": CT})
    assert found is not None and found.layout.group_size == 32


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_describe_then_detect(method: str) -> None:
    forms = {
        "gptq": GPTQFormat(group_size=64),
        "awq": AWQFormat(group_size=64),
        "compressed-tensors": CompressedTensorsFormat(group_size=64),
    }
    form = forms[method]
    layouts = {"model.layers.0.up": form, "model.layers.10.up": form}
    skipped = ["model.layers.1.up", "lm_head"]
    config = detect({"quantization_config": describe(form, layouts, skipped).to_dict()})
    assert config is not None
    assert {name: config.layout_of(name) for name in layouts} == layouts
    assert config.layout_of("model.layers.1.up") is None


def test_per_layer_forms_are_described() -> None:
    wide = GPTQFormat(group_size=None, bits=8)
    layouts = {"a.0.up": GPTQFormat(), "a.0.down": wide}
    config = detect({"quantization_config": describe(GPTQFormat(), layouts).to_dict()})
    assert config is not None and config.layout_of("a.0.down") == wide
    other = {"a": GPTQFormat(symmetric=False, checkpoint_format="gptq_v2")}
    with pytest.raises(ValueError, match="differ in bits and group size only, got more for a"):
        describe(GPTQFormat(), other)


def test_a_side_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "quant_config.json").write_text(" " * 2**21)
    with pytest.raises(UserError, match="must be at most 1048576 bytes"):
        detect({}, tmp_path)
    (tmp_path / "quant_config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="could not read"):
        detect({}, tmp_path)
    with pytest.raises(UserError, match="must be an object, got list"):
        detect({"quantization_config": []})


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
GROUP = CT["config_groups"]["g"]
KEYS = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "version"),
    *("checkpoint_format", "format", "zero_point", "modules_to_not_convert", "dynamic", "meta"),
    *("pack_dtype", "is_marlin_format", "lm_head", "damp_percent", "config_groups", "ignore"),
    *("kv_cache_scheme", "sparsity_config", "quantization_status", "transform_config"),
)
WEIGHT_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "dynamic")


@given(
    start=st.sampled_from([ENTRY, AWQ | {"quant_method": "awq"}, CT]),
    changes=st.dictionaries(st.sampled_from(KEYS), ANY, max_size=3),
    group=st.dictionaries(st.sampled_from(["targets", "weights", "input_activations"]), ANY),
    weights=st.dictionaries(st.sampled_from(WEIGHT_KEYS), ANY, max_size=2),
)
@settings(max_examples=300, deadline=None)
def test_a_damaged_entry_is_read_or_refused_in_one_line(start, changes, group, weights) -> None:
    entry = start | changes
    if "config_groups" in start and "config_groups" not in changes:
        scheme = GROUP | {"weights": GROUP["weights"] | weights} | group
        entry = entry | {"config_groups": {"g": scheme}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            found = detect({"quantization_config": entry})
        except UserError as error:
            assert str(error).startswith("checkpoint: ") and "\n" not in str(error)
            return
    assert found is not None
    found.layout_of("model.layers.0.up")
