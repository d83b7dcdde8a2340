"""compressed-tensors configs: groups, targets, ignore; every kind we cannot run refused by name."""

from __future__ import annotations

import copy

import pytest

from ridgeline.core.errors import UserError
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.compressed_tensors_config import (
    CompressedTensorsConfig,
    SchemeGroup,
    describe,
    read_config,
)

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
ENTRY = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "version": "0.12.2",
}


def changed(**weights: object) -> dict:
    entry = copy.deepcopy(ENTRY)
    entry["config_groups"]["group_0"]["weights"] |= weights
    return entry


def in_group(**values: object) -> dict:
    entry = copy.deepcopy(ENTRY)
    entry["config_groups"]["group_0"] |= values
    return entry


FORMS = [
    CompressedTensorsFormat(bits=bits, group_size=group, symmetric=symmetric, desc_act=desc_act)
    for bits in (2, 3, 4, 8)
    for group in (32, None)
    for symmetric in (True, False)
    for desc_act in (True, False)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_round_trip(form: CompressedTensorsFormat) -> None:
    other = CompressedTensorsFormat(bits=8, group_size=None)
    config = CompressedTensorsConfig(
        groups=(
            SchemeGroup(targets=("Linear",), layout=form),
            SchemeGroup(targets=("a.b", r"re:.*\.down"), layout=other),
        ),
        ignore=("lm_head", "re:.*gate$"),
    )
    assert read_config(config.to_dict()) == config


def test_written_entry_is_what_the_library_writes() -> None:
    config = CompressedTensorsConfig(
        groups=(SchemeGroup(targets=("Linear",), layout=CompressedTensorsFormat()),),
        ignore=("lm_head",),
    )
    entry = config.to_dict()
    assert entry["quant_method"] == "compressed-tensors" and entry["format"] == "pack-quantized"
    assert entry["quantization_status"] == "compressed" and entry["ignore"] == ["lm_head"]
    assert entry["config_groups"]["group_0"]["weights"].items() >= WEIGHTS.items()


def test_names_come_before_expressions_before_the_class() -> None:
    forms = [CompressedTensorsFormat(bits=bits) for bits in (2, 3, 4)]
    targets = [("Linear",), (r"re:.*layers\.1\.",), ("model.layers.1.mlp.up_proj",)]
    config = CompressedTensorsConfig(
        groups=tuple(
            SchemeGroup(targets=each, layout=form)
            for each, form in zip(targets, forms, strict=True)
        ),
        ignore=("lm_head", r"re:.*router"),
    )
    found = {
        name: config.layout_of(name)
        for name in (
            "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.down_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.1.router",
            "lm_head",
        )
    }
    assert list(found.values()) == [*forms, None, None]
    named = CompressedTensorsConfig(groups=(SchemeGroup(targets=("a",), layout=forms[0]),))
    assert named.layout_of("b") is None


@pytest.mark.parametrize(
    ("weights", "form"),
    [
        ({"strategy": None}, CompressedTensorsFormat(group_size=128)),
        ({"strategy": None, "group_size": -1}, CompressedTensorsFormat(group_size=None)),
        (
            {"strategy": "channel", "group_size": None},
            CompressedTensorsFormat(group_size=None),
        ),
        ({"actorder": "static"}, CompressedTensorsFormat()),
        ({"actorder": "weight"}, CompressedTensorsFormat()),
        ({"actorder": False}, CompressedTensorsFormat()),
        ({"actorder": "group"}, CompressedTensorsFormat(desc_act=True)),
        ({"actorder": True}, CompressedTensorsFormat(desc_act=True)),
        ({"symmetric": False, "num_bits": 8}, CompressedTensorsFormat(bits=8, symmetric=False)),
    ],
)
def test_schemes(weights: dict, form: CompressedTensorsFormat) -> None:
    assert read_config(changed(**weights)).layout == form


def test_missing_entries_have_defaults() -> None:
    entry = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": 32}}}}
    config = read_config(entry)
    assert config.layout == CompressedTensorsFormat(bits=8, group_size=32)
    assert config.ignore == ()


def test_describe_lists_exceptions_by_name() -> None:
    most, other = CompressedTensorsFormat(), CompressedTensorsFormat(bits=8)
    config = describe(most, {"a.0.up": most, "a.0.down": other}, ["a.1.up"])
    assert config.layout_of("a.0.up") == most and config.layout_of("a.0.down") == other
    assert config.layout_of("a.1.up") is None and config.layout_of("lm_head") is None
    assert describe(most, {"lm_head": most}, []).layout_of("lm_head") == most


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ENTRY | {"quant_method": "awq"}, "quant_method must be compressed-tensors here"),
        (ENTRY | {"format": "float-quantized"}, "stored as pack-quantized, got 'float-quantized'"),
        (ENTRY | {"format": "int-quantized"}, "got 'int-quantized'"),
        (ENTRY | {"format": "marlin-24"}, "got 'marlin-24'"),
        (in_group(format="nvfp4-pack-quantized"), "got 'nvfp4-pack-quantized'"),
        (in_group(input_activations={"num_bits": 8}), "input_activations must be null, got quan"),
        (in_group(output_activations={"num_bits": 8}), "output_activations must be null"),
        (ENTRY | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be null"),
        (ENTRY | {"quantization_status": "frozen"}, "must be compressed, got 'frozen'"),
        (ENTRY | {"sparsity_config": {"format": "sparse-24"}}, "must be dense, got 'sparse-24'"),
        (ENTRY | {"transform_config": {"config_groups": {}}}, "transform_config must be empty"),
        (ENTRY | {"config_groups": {}}, "config_groups must hold a group, got none"),
        (ENTRY | {"config_groups": ["a"]}, "config_groups must be an object, got list"),
        (in_group(targets=[]), "targets must name layers, got none"),
        (in_group(targets="Linear"), "targets must be a list of strings"),
        (
            in_group(targets=["re:("]),
            "must hold simple regular expressions after re:, got 're:[(]'",
        ),
        (ENTRY | {"ignore": ["re:["]}, "must hold simple regular expressions after re:"),
        (ENTRY | {"ignore": ["re:(a|a)*$"]}, "a choice inside a repetition"),
        (ENTRY | {"ignore": [1]}, "ignore must be a list of strings"),
        (changed(type="float"), "type must be int, got 'float'"),
        (changed(dynamic=True), "dynamic must be false"),
        (changed(num_bits=5), "bits must be 2, 3, 4 or 8, got 5"),
        (changed(num_bits="4"), "num_bits must be a whole number, got '4'"),
        (changed(group_size=0), "group_size must be positive"),
        (changed(strategy="tensor"), "got 'tensor' and 128"),
        (changed(strategy="block"), "got 'block' and 128"),
        (changed(strategy="group", group_size=None), "got 'group' and None"),
        (changed(actorder="random"), "actorder must be null, weight, static or group"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(entry: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(entry)
