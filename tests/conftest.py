"""Shared by all tests: one thread (two workers share two cores), one seed, an empty cache."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user cache: nothing a test writes stays, nothing kept changes a test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RIDGELINE_CACHE", str(folder))
    return folder
