"""The one rule of special tokens, with a tokenizer that puts a BOS before every text."""

from __future__ import annotations

import shutil

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from ridgeline.cli import calibration, eval_work
from ridgeline.cli import eval as eval_command
from ridgeline.cli.eval import EvalConfig
from ridgeline.cli.generate import GenerateConfig, generate
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.train.documents import DocumentRule
from ridgeline.train.tokens import load_tokenizer, tokenize_files

BOS = 256


class _SeenError(Exception):
    pass


def _raise_ids(*args, **_):
    raise _SeenError([int(each) for each in args[-1]])


@pytest.fixture
def folder(model_folder, tmp_path):
    folder = tmp_path / "bos"
    shutil.copytree(model_folder, folder)
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    name = built.id_to_token(BOS)
    built.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, BOS)])
    built.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("a", add_special_tokens=True) == [BOS, 97]
    return folder


def test_text_that_is_scored_or_learned_from_has_none(folder, text_file, tmp_path, monkeypatch):
    plain = list(text_file.read_bytes())
    monkeypatch.setattr(eval_work, "perplexity", lambda model, ids, **_: _raise_ids(ids))
    with pytest.raises(_SeenError) as scored:
        eval_command.eval(EvalConfig(model=folder, text=text_file))
    monkeypatch.setattr(calibration, "calibration_blocks", _raise_ids)
    with pytest.raises(_SeenError) as calibrated:
        quantize(QuantizeConfig(model=folder, out=tmp_path / "out", text=text_file, group_size=32))
    assert scored.value.args[0] == calibrated.value.args[0] == plain
    tokenizer = load_tokenizer(folder)
    store = tokenize_files([text_file], DocumentRule(kind="file"), tokenizer, tmp_path / "tokens")
    assert store.tokens.tolist()[: len(plain) - 1] == plain[:-1] and store.tokens[-1] == BOS
    assert (store.tokens == BOS).sum() == 1  # the document's end


def test_a_raw_prompt_follows_the_tokenizer_and_a_chat_its_template(folder):
    raw = generate(GenerateConfig(model=folder, prompt="fox", chat=False, max_new_tokens=1))
    assert raw["answers"][0]["prompt_tokens"] == 1 + len("fox")
    chat = generate(GenerateConfig(model=folder, prompt="fox", max_new_tokens=1))
    assert chat["answers"][0]["prompt_tokens"] == len("<user>fox\n<assistant>")
