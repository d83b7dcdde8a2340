import json

import numpy as np
import pytest

from ridgeline.core.errors import UserError
from ridgeline.train import tokens
from ridgeline.train.config import DataConfig
from ridgeline.train.documents import DocumentRule
from ridgeline.train.tokens import (
    byte_tokenizer,
    choose_tokenizer,
    load_tokenizer,
    parse_tokenizer,
    tokenize_files,
)

RULE = DocumentRule(kind="blank_line")


def write(tmp_path, text, name="a.txt"):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


def test_byte_tokens_are_bytes():
    built = byte_tokenizer()
    text = "naïve 東京\n\t\x00 end" + "".join(chr(i) for i in range(1, 300))
    ids = built.build().encode(text).ids
    assert ids == list(text.encode())
    assert built.build().decode(ids) == text
    assert (built.end_id, built.vocab_size) == (256, 257)


def test_a_store_holds_the_documents(tmp_path):
    file, other = write(tmp_path, "ab\n\ncd\n"), write(tmp_path, "é", "b.txt")
    store = tokenize_files([file, other], RULE, byte_tokenizer(), tmp_path / "cache")
    assert store.tokens.tolist() == [97, 98, 256, 99, 100, 256, 0xC3, 0xA9, 256]
    assert store.offsets.tolist() == [0, 3, 6, 9]
    assert store.tokens.dtype == np.uint16 and store.num_documents == 3


def test_the_cache_is_used_and_renewed(tmp_path, monkeypatch):
    file, cache = write(tmp_path, "ab\n\ncd\n"), tmp_path / "cache"
    first = tokenize_files([file], RULE, byte_tokenizer(), cache)
    calls = []
    write_store = tokens._write_store
    monkeypatch.setattr(tokens, "_write_store", lambda *a: (calls.append(a), write_store(*a)))
    again = tokenize_files([file], RULE, byte_tokenizer(), cache)
    assert not calls and again.fingerprint == first.fingerprint
    (cache / first.fingerprint / "tokens.bin").write_bytes(b"cut")
    renewed = tokenize_files([file], RULE, byte_tokenizer(), cache)
    assert len(calls) == 1 and renewed.tokens.tolist() == [97, 98, 256, 99, 100, 256]
    file.write_text("other\n")
    other = tokenize_files([file], RULE, byte_tokenizer(), cache)
    by_file = tokenize_files([file], DocumentRule(kind="file"), byte_tokenizer(), cache)
    assert len({first.fingerprint, other.fingerprint, by_file.fingerprint}) == 3


def test_another_rule_is_another_entry(tmp_path):
    file, cache = write(tmp_path, "a\n#\nb\n%\nc\n"), tmp_path / "cache"
    rules = [DocumentRule(kind="separator", separator=line) for line in ("#", "%")]
    stores = [tokenize_files([file], rule, byte_tokenizer(), cache) for rule in rules]
    assert [store.offsets.tolist() for store in stores] == [[0, 2, 8], [0, 6, 8]]


def test_a_bad_file_leaves_nothing_in_the_cache(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"good\n\nbad \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        tokenize_files([file], RULE, byte_tokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_bpe_is_trained_once_and_kept(tmp_path, license_text, monkeypatch):
    config = DataConfig(
        files=(license_text,), tokenizer="bpe", vocab_size=400, cache=tmp_path / "cache"
    )
    first = choose_tokenizer(config, None)
    text = "You may reproduce and distribute copies — naïve 東京"
    ids = first.build().encode(text).ids
    assert first.build().decode(ids) == text
    assert first.vocab_size == 400 and first.end_id == 0
    assert len(ids) < 0.75 * len(text.encode())

    def fail(*_):
        raise AssertionError("trained twice")

    monkeypatch.setattr(tokens, "train_bpe", fail)
    assert choose_tokenizer(config, None) == first


def test_a_tokenizer_from_a_folder(tmp_path):
    named = {"eos_token": {"content": "<stop>"}}
    built = byte_tokenizer().build()
    folder = tmp_path / "folder"
    folder.mkdir()
    text = json.loads(built.to_str())
    text["added_tokens"][0]["content"] = "<stop>"
    text["model"]["vocab"]["<stop>"] = text["model"]["vocab"].pop("<|endoftext|>", 256)
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match="has none of the end tokens"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    found = choose_tokenizer(DataConfig(), folder)
    assert found.end_id == 256 and json.loads(found.extra_files["tokenizer_config.json"]) == named
    assert choose_tokenizer(DataConfig(tokenizer=str(folder / "tokenizer.json")), None) == found


def test_settings_that_cut_or_pad_are_not_followed():
    built = byte_tokenizer().build()
    built.enable_truncation(3)
    built.enable_padding(length=9)
    assert len(built.encode("abcdef").ids) == 9
    found = parse_tokenizer(built.to_str(), "here")
    assert found.build().encode("abcdef").ids == list(b"abcdef")


def test_tokenizers_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"could not read .*tokenizer.json: No such file"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"there is not a tokenizer.json"):
        parse_tokenizer("{}", "there")
