"""The layout that quack's exported kernels are given: every code and scale where its tables say."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels" / "w4a16"


def test_blocks_follow_the_tables(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    peer = importlib.import_module("quack_peer")
    torch.manual_seed(0)
    n, k = 128, 256
    code_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale_NR = torch.randn(n, k // 128).bfloat16()
    code_order, scale_order = torch.randperm(4096), torch.randperm(64)
    blob, strip = peer.pack(code_NK, scale_NR, code_order, scale_order)
    found = torch.stack([blob & 15, blob >> 4], 1).view(n // 64, k // 64, 4096)
    scales = strip.view(torch.bfloat16).view(n // 64, k // 64, 64)
    for row in range(n // 64):
        for column in range(k // 64):
            block = code_NK[64 * row : 64 * row + 64, 64 * column : 64 * column + 64]
            assert torch.equal(found[row, column], block.flatten()[code_order])
            group = scale_NR[64 * row : 64 * row + 64, column // 2]
            assert torch.equal(scales[row, column], group[scale_order])
