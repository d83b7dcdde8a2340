"""ridgeline quantize before the work: what is refused, what is predicted, how a text is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from ridgeline.cli import calibration, quantize_report, quantize_run
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.cli.quantize_checks import journal_folder
from ridgeline.core.errors import UserError
from ridgeline.nn.hf import load_hf_config
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.predict import Rates
from tests.cli.test_quantize import TEXT, config_of


@pytest.fixture
def config(model_folder, text_file, tmp_path, monkeypatch) -> QuantizeConfig:
    """Rates are given and no page is drawn: neither is looked at here."""
    monkeypatch.setattr(quantize_report, "page", lambda *_: None)
    monkeypatch.setattr(quantize_report, "render", lambda _: "")
    rates = Rates(flops=1e11, elements=1e9)
    monkeypatch.setattr(Rates, "measure", lambda *_: rates)
    return config_of(model_folder, text_file, tmp_path / "out")


def test_a_head_that_cannot_be_packed_is_refused_before_the_work(config, monkeypatch):
    """257 outputs in GPTQ's words of 8; before any block, and before a prediction."""
    monkeypatch.setattr(quantize_run, "quantize_model", lambda *_, **__: pytest.fail("worked"))
    wrong = replace(config, method="gptq", lm_head=True)
    for tried in (wrong, replace(wrong, dry_run=True)):
        with pytest.raises(UserError, match="quantize: lm_head: gptq: out_features must be a mult"):
            quantize(tried)
    with pytest.raises(
        UserError, match=r"0\.mlp\.down_proj: group_size must divide its \d+ inputs, got 7"
    ):
        quantize(replace(config, override=("down_proj=group:7",)))
    assert not journal_folder(config.out).exists()


def test_an_exception_that_the_config_cannot_state_is_refused_before_the_work(config, monkeypatch):
    monkeypatch.setattr(quantize_run, "quantize_model", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(ValueError, match="awq: .*down_proj"):
        quantize(replace(config, format="awq", override=("down_proj=group:16",)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "be one of .*, got MixtralForCausalLM"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map must be absent, .* is never run"),
    ],
)
def test_another_architecture_is_refused_before_the_text_is_read(
    config, tmp_path, monkeypatch, changes, said
):
    folder = tmp_path / "model"
    shutil.copytree(config.model, folder)
    raw = load_hf_config(folder) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr(quantize_run, "read_tokens", lambda *_: pytest.fail("read"))
    with pytest.raises(UserError, match=said):
        quantize(replace(config, model=folder))


def test_a_long_text_is_tokenized_in_pieces(model_folder, monkeypatch):
    """Pieces end after a line where there is one, and nothing is lost between them."""
    tokenizer = Tokenizer(model_folder)
    text = TEXT + "\n" + TEXT[:700] + "\n" + "ends without one"
    whole = calibration.encoded(tokenizer, text)
    assert whole.tolist() == tokenizer.encode(text)
    pieces, encode = [], tokenizer.encode
    monkeypatch.setattr(calibration, "_WHOLE_CHARS", 100)
    monkeypatch.setattr(calibration, "_PIECE_CHARS", 800)
    monkeypatch.setattr(tokenizer, "encode", lambda part: pieces.append(part) or encode(part))
    ids = calibration.encoded(tokenizer, text)
    assert "".join(pieces) == text and 1 < len(pieces) and max(map(len, pieces)) <= 800
    assert ids.tolist() == [token for part in pieces for token in encode(part)]
    assert pieces[-2].endswith("\n") and ids.dtype == torch.int64


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"override": (r"down_proj=bits:8,group:32",), "skip": (r"layers\.0.*gate",)},
        {"lm_head": True, "format": "compressed-tensors"},
        {"target_bits": 5.5, "widths": (3, 4, 8)},
        {"method": "rtn", "bits": 2, "text": None, "held_out_windows": 0},
    ],
)
def test_the_predicted_folder_is_the_one_written(config, changes):
    """Within a twentieth, exceptions, the head and mixed widths in it; each costs time to do."""
    config = replace(config, method="gptq", **{k: v for k, v in changes.items() if k != "method"})
    config = replace(config, method=changes.get("method", "gptq"))
    said = quantize(config)
    assert said["bytes"] == pytest.approx(said["predicted"]["out_bytes"], rel=0.05)
    if changes.keys() & {"lm_head", "target_bits"}:
        plain = quantize(replace(config, lm_head=False, target_bits=None, dry_run=True))
        assert said["predicted"]["seconds"] > plain["predicted"]["seconds"]


def test_reading_the_text_counts_in_the_prediction(config, monkeypatch):
    """A peak that lies behind the run already is no less of the process."""
    monkeypatch.setattr(quantize_run, "_process_peak", lambda: 123e9)
    assert quantize(replace(config, dry_run=True))["predicted"]["device_bytes"] == 123e9
