"""What several test files of training share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from ridgeline.train import checkpoint
from ridgeline.train.tokens import TokenStore

ROOT = Path(__file__).parents[2]


def store_of(documents) -> TokenStore:
    lengths = [len(d) for d in documents]
    return TokenStore(
        tokens=np.concatenate([np.asarray(d, dtype=np.uint16) for d in documents]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        fingerprint="test",
    )


def rows_of(config, kind="train"):
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def curve(config):
    """What must not depend on interruptions: (step, loss, gradient norm, lr, consumed)."""
    keys = ("step", "loss", "grad_norm", "lr", "consumed_samples")
    return [tuple(row[key] for key in keys) for row in rows_of(config)]


def tensors_of(path):
    found = checkpoint.load(path)
    return found.model | found.optimizer


def assert_same(config, expected):
    wanted_curve, wanted_tensors = expected
    assert curve(config) == wanted_curve
    found = tensors_of(config.run_dir / "checkpoints" / "step-00000006")
    assert found.keys() == wanted_tensors.keys()
    assert all(torch.equal(found[name], wanted_tensors[name]) for name in found)
