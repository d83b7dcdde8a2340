"""The tokenizer against transformers on real text, streaming, and broken files."""

from __future__ import annotations

import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import UserError
from ridgeline.core.text import wiki_documents
from ridgeline.nn.tokenizer import Tokenizer

from .conftest import TEXT, trained_bpe

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße?\n"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained_bpe().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_equals_transformers(tokenizer_folder):
    ours = Tokenizer(tokenizer_folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    for text in (TEXT, "", " ", "a<|im_end|>b <|endoftext|>", "\u00e9\u0301 \u200d", "\x00\x7f"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=True) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert ours.encode_batch([TEXT, "x"]) == [ours.encode(TEXT), ours.encode("x")]
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.role_id("eos_token") == theirs.eos_token_id == ours.token_id("<|im_end|>")
    assert ours.role_id("pad_token") is None


def test_chat_prompt_equals_transformers(tokenizer_folder):
    ours = Tokenizer(tokenizer_folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=generation
        )
        assert ours.apply_chat_template(MESSAGES, add_generation_prompt=generation) == expected
    assert expected.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_template_from_its_own_file_or_a_list(tokenizer_folder):
    path = tokenizer_folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ eos_token }}"},
    ]
    path.write_text(json.dumps(config | {"chat_template": named}))
    assert Tokenizer(tokenizer_folder).apply_chat_template(MESSAGES) == "D<|im_end|>"
    (tokenizer_folder / "chat_template.jinja").write_text("F")
    assert Tokenizer(tokenizer_folder).apply_chat_template(MESSAGES) == "F"


def test_no_template(tokenizer):
    with pytest.raises(ValueError, match="tokenizer: chat_template must come with the tokenizer"):
        tokenizer.apply_chat_template(MESSAGES)


def test_stream_never_cuts_a_character(tokenizer):
    ids = tokenizer.encode(TEXT * 2)
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.flush() == TEXT * 2
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(pieces) / 2  # it does not wait for the end


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=40), skip=st.booleans())
def test_stream_joined_equals_decode(tokenizer, ids, skip):
    """Any tokens, broken UTF-8 included."""
    stream = tokenizer.stream(skip_special_tokens=skip)
    joined = "".join([stream.push(token_id) for token_id in ids]) + stream.flush()
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


def test_stream_restarts_after_flush(tokenizer):
    stream = tokenizer.stream()
    first = tokenizer.encode("\u65e5")
    assert stream.push(first[0]) == "" and stream.flush() == "\ufffd"
    assert "".join(map(stream.push, tokenizer.encode("ok"))) == "ok"


def test_missing_and_malformed(tmp_path, tokenizer_folder):
    with pytest.raises(UserError, match="tokenizer: tokenizer.json must exist, got none in"):
        Tokenizer(tmp_path)
    (tokenizer_folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UserError, match="must be a tokenizer of the tokenizers library") as caught:
        Tokenizer(tokenizer_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.weights
def test_real_tokenizer_equals_transformers(smollm):
    """SmolLM2 on Wikipedia leads: ids, text, chat prompt, streaming."""
    ours = Tokenizer(smollm)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm)
    documents = wiki_documents()[::50] + [TEXT]
    for document in documents:
        ids = ours.encode(document)
        assert ids == theirs(document)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids) == document
    stream = ours.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == TEXT
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES) == expected
    assert ours.encode("12345") == [ours.token_id(digit) for digit in "12345"]
