"""Reading what AWQ writers put into a config, and writing what they read."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import UserError
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.awq_config import AWQConfig, describe, read_config

PLAIN = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("skipped", [(), ("lm_head", "visual")])
def test_round_trip(group: int | None, skipped: tuple[str, ...]) -> None:
    config = AWQConfig(layout=AWQFormat(group_size=group), skipped=skipped)
    assert read_config(config.to_dict()) == config


def test_written_entry_has_the_names_loaders_read() -> None:
    entry = AWQConfig(layout=AWQFormat(group_size=None, symmetric=True)).to_dict()
    assert entry == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


@pytest.mark.parametrize("bits", ["bits", "w_bit", "wbits"])
@pytest.mark.parametrize("group", ["group_size", "q_group_size"])
@pytest.mark.parametrize("version", ["version", "format", "checkpoint_format"])
def test_synonyms(bits: str, group: str, version: str) -> None:
    layout = read_config({bits: 4, group: 64, version: "GEMV_FAST"}).layout
    assert layout == AWQFormat(group_size=64, version="gemv_fast")


def test_skipped_layers_are_named_by_parts() -> None:
    config = read_config(PLAIN | {"modules_to_not_convert": ["visual", "lm_head"]})
    assert config.layout_of("model.visual.0.qkv") is None
    assert config.layout_of("model.layers.0.mlp.up_proj") == config.layout


def test_describe() -> None:
    form = AWQFormat(group_size=64)
    config = describe(form, {"a.up_proj": form}, ["a.down_proj"])
    assert config.skipped == ("a.down_proj",)
    with pytest.raises(ValueError, match="layers must have one width and group size, got others"):
        describe(form, {"a": form, "b": AWQFormat(group_size=32)}, [])
    with pytest.raises(ValueError, match="no part of a quantized layer's, got one inside a.gate_p"):
        describe(form, {"a.gate_proj": form}, ["a.gate"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method must be awq here, got 'gptq'"),
        ({"version": "marlin"}, "version must be one of gemm, gemv, gemv_fast, got 'marlin'"),
        ({"bits": 8}, "bits must be 4, got 8"),
        ({"bits": "4"}, "bits must be a whole number, got '4'"),
        ({"group_size": None}, "group_size must be a whole number, got None"),
        ({"group_size": 0}, "group_size must be positive or None, got 0"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of strings, got 'lm_head'"),
        ({"modules_to_not_convert": [""]}, "an empty one; it would match every layer"),
        ({"dynamic": {"a": {"bits": 8}}}, "dynamic must be empty for AWQ"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(PLAIN | change)
