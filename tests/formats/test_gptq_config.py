"""Reading what other writers put into a config, and writing what they read."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import UserError
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.gptq_config import GPTQConfig, LayerRule, read_config

PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    "config",
    [
        GPTQConfig(layout=GPTQFormat()),
        GPTQConfig(
            layout=GPTQFormat(
                bits=3,
                group_size=None,
                symmetric=False,
                desc_act=True,
                checkpoint_format="gptq_v2",
            ),
            lm_head=True,
            damping=0.02,
            static_groups=True,
            true_sequential=False,
        ),
        GPTQConfig(
            layout=GPTQFormat(group_size=64),
            rules=(
                LayerRule(pattern=r".*down_proj", bits=8, group_size=32),
                LayerRule(pattern=r".*o_proj", skip=True),
            ),
        ),
    ],
)
def test_round_trip(config: GPTQConfig) -> None:
    assert read_config(config.to_dict()) == config


def test_written_entry_has_the_names_loaders_read() -> None:
    entry = GPTQConfig(layout=GPTQFormat(group_size=None)).to_dict()
    assert entry["quant_method"] == "gptq" and entry["bits"] == 4 and entry["group_size"] == -1
    assert entry["sym"] is True and entry["desc_act"] is False
    assert entry["checkpoint_format"] == "gptq"


@pytest.mark.parametrize("bits", ["bits", "w_bit", "wbits"])
@pytest.mark.parametrize("group", ["group_size", "q_group_size"])
@pytest.mark.parametrize("version", ["checkpoint_format", "format", "version"])
def test_synonyms(bits: str, group: str, version: str) -> None:
    layout = read_config({bits: 8, group: -1, version: "gptq_v2", "zero_point": True}).layout
    assert layout == GPTQFormat(
        bits=8, group_size=None, symmetric=False, checkpoint_format="gptq_v2"
    )


def test_missing_symmetry_is_assumed_with_a_warning() -> None:
    entry = {key: value for key, value in PLAIN.items() if key != "sym"}
    with pytest.warns(UserWarning, match="does not say sym; symmetric is assumed"):
        assert read_config(entry).layout.symmetric


@pytest.mark.parametrize(
    ("meta", "writer"),
    [
        ({"quantizer": ["gptqmodel:5.1.0"]}, "gptqmodel:5.1.0"),
        ({"quantizer": "auto-gptq:0.7"}, "auto-gptq:0.7"),
        ({"quantizer": []}, "unknown"),
        (None, "unknown"),
    ],
)
def test_writer(meta: object, writer: str) -> None:
    assert read_config(PLAIN | {"meta": meta}).layout.writer == writer


def test_rules_choose_a_layers_form() -> None:
    dynamic = {
        r"+:model\.layers\.0\..*": {"bits": 8},
        r"-:.*down": {},
        r".*q_proj": {"group_size": 32},
    }
    config = read_config(PLAIN | {"dynamic": dynamic})
    first = config.layout_of("model.layers.0.mlp.down_proj")
    assert first is not None and (first.bits, first.group_size) == (8, 128)
    assert config.layout_of("model.layers.1.mlp.down_proj") is None
    query = config.layout_of("model.layers.1.self_attn.q_proj")
    assert query is not None and (query.bits, query.group_size) == (4, 32)
    assert config.layout_of("model.layers.1.mlp.up_proj") == config.layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method must be gptq here, got 'awq'"),
        ({"is_marlin_format": True}, "got is_marlin_format"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
        ({"bits": 7}, "bits must be 2, 3, 4 or 8, got 7"),
        ({"bits": "4"}, "bits must be a whole number, got '4'"),
        ({"group_size": None}, "group_size must be a whole number, got None"),
        ({"pack_dtype": "int8"}, "pack_dtype must be int32, got 'int8'"),
        ({"dynamic": {".*": {"sym": False}}}, "must hold only bits and group_size, got sym"),
        ({"dynamic": {"(": {}}}, "the pattern"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(PLAIN | change)
