"""A tiny random decoder whose tokens vary, on disk too, with a byte-level tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import save_pretrained
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.train.presets import preset
from ridgeline.train.tokens import byte_tokenizer

CONTEXT = 128


def tiny_decoder(seed: int = 1, **changes) -> Decoder:
    """Larger weights than fresh ones: attention is not uniform and greedy text does not stall."""
    shape = replace(preset("tiny"), max_seqlen=CONTEXT, **changes)
    model = Decoder(shape, dtype=torch.float32, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model.eval().requires_grad_(False)


def write_model(folder: Path, seed: int = 1, **changes) -> Path:
    tokenizer = byte_tokenizer()
    model = tiny_decoder(seed, vocab_size=tokenizer.vocab_size, **changes)
    save_pretrained(model, folder)
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_folder) -> Tokenizer:
    return Tokenizer(model_folder)
