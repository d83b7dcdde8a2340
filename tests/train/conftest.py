"""A decoder small enough for many runs, and text to train it on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.nn.config import DecoderConfig
from ridgeline.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelChoice,
    OptimConfig,
    TrainConfig,
)
from tests.train.helpers import ROOT


@pytest.fixture
def license_text() -> Path:
    """Real English text that every checkout has: some 11,000 characters in blank-line documents."""
    return ROOT / "LICENSE"


@pytest.fixture
def small_model(tmp_path) -> Path:
    """A folder with the config.json of a two-layer decoder."""
    shape = DecoderConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_seqlen=128,
        tie_embeddings=True,
    )
    folder = tmp_path / "small_model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.to_hf()), encoding="utf-8")
    return folder


@pytest.fixture
def make_config(tmp_path, license_text, small_model):
    """Build a config of a fast run; keywords replace fields, dicts replace fields of a part."""

    def make(run: str = "run", **changes) -> TrainConfig:
        parts = {
            "model": (ModelChoice, {"folder": small_model}),
            "data": (
                DataConfig,
                {
                    "files": (license_text,),
                    "tokenizer": "byte",
                    "seqlen": 64,
                    "cache": tmp_path / "tokens",
                },
            ),
            "optim": (OptimConfig, {"lr": 5e-3, "warmup_steps": 2}),
            "checkpoint": (CheckpointConfig, {"every_steps": 2, "export": False}),
            "log": (LogConfig, {"eval_samples": 2}),
        }
        built = {
            name: kind(**values | changes.pop(name, {})) for name, (kind, values) in parts.items()
        }
        fields = {"steps": 6, "batch_samples": 4, "micro_batch_samples": 2, "device": "cpu"}
        return TrainConfig(run_dir=tmp_path / run, **fields | changes, **built)

    return make
