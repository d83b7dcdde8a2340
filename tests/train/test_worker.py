"""One process honours the layout's options that need no second one."""

from __future__ import annotations

import pytest
import torch

from ridgeline.parallel import activations
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.loss import linear_cross_entropy
from ridgeline.train.config import TrainConfig
from ridgeline.train.presets import preset
from ridgeline.train.worker import OneProcess


@pytest.mark.parametrize(("kind", "gates"), [("none", 1), ("selective", 2), ("full", 2)])
def test_one_process_recomputes_what_the_layout_says(kind, gates):
    shape = preset("tiny")
    config = TrainConfig(layout=Layout(activation_checkpointing=kind))
    worker = OneProcess(config, shape, torch.device("cpu"))
    calls = []
    for block in worker.model.blocks:
        block.mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(16)[None]
    hidden = worker.model.hidden(ids).flatten(0, 1)
    linear_cross_entropy(hidden, worker.model.lm_head.weight, ids[0])[0].backward()
    assert len(calls) == gates * shape.num_layers


def test_one_process_compiles_its_blocks(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda run, **_: compiled.append(run) or run)
    activations._function.cache_clear()
    config = TrainConfig(layout=Layout(compile_blocks=True))
    OneProcess(config, preset("tiny"), torch.device("cpu"))
    activations._function.cache_clear()
    assert len(compiled) == 1  # for all blocks
