"""A tiny model folder that every command can open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import save_pretrained
from ridgeline.train.presets import preset
from ridgeline.train.tokens import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A decoder of 2 layers with fresh weights and a tokenizer of bytes, in float32."""
    root = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    companions = root / "tokenizer"
    companions.mkdir()
    for name, text in tokenizer.files().items():
        (companions / name).write_text(text, encoding="utf-8")
    (companions / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    shape = replace(
        preset("tiny"),
        vocab_size=tokenizer.vocab_size,
        max_seqlen=256,
        eos_token_ids=(tokenizer.end_id,),
    )
    save_pretrained(
        Decoder(shape, dtype=torch.float32, seed=1), root / "tiny", tokenizer_from=companions
    )
    return root / "tiny"


@pytest.fixture
def text_file(tmp_path) -> Path:
    """2,000 bytes of English."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 45, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
