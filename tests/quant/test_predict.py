"""Predicted peak memory against what a run in memory takes, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core import env
from ridgeline.quant.predict import Rates, predict, shape_in_memory
from ridgeline.quant.recipe import Recipe

from .models import TinyModel

ROOT = Path(__file__).parents[2]
RATES = Rates(flops=1e11, elements=1e9)
MEASURE = """
import json, sys
from pathlib import Path
import torch
from ridgeline.core.host_memory import keep_freed_memory
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.quant import predict as room
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.recipe import Recipe

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def decoder(width, layers):
    return Decoder(DecoderConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_layers=layers,
        num_heads=width // 64, num_kv_heads=1, head_dim=64, max_seqlen=256,
    )).requires_grad_(False)

assert keep_freed_memory()
recipe = Recipe(method=sys.argv[1], layout=GPTQFormat(group_size=64), batch_sequences=8)
quantize_model(decoder(64, 1), torch.randint(0, 1024, (2, 64)), recipe)  # what is loaded lazily
before = held("VmRSS:")
model = decoder(512, 2)
shape = room.shape_in_memory(model, tokens=24 * 256, sequence_tokens=256, batch_tokens=8 * 256)
guess = room.predict(shape, recipe, "cpu", room.Rates(flops=1e11, elements=1e9))
Path("/proc/self/clear_refs").write_text("5")
quantize_model(model, torch.randint(0, 1024, (24, 256)), recipe)
guessed = guess.device_bytes - room._PROCESS_BYTES
print(json.dumps({"predicted": guessed, "measured": held("VmHWM:") - before}))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak that can be set back"
)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_peak_of_a_run_in_memory(method: str) -> None:
    """Within a third, either way; what the process holds before is left out on both sides."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, method], cwd=ROOT, capture_output=True, text=True,
        env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["measured"] / 1.5 < said["predicted"] < said["measured"] * 1.5, said


def test_a_model_in_memory_counts_whole() -> None:
    """Every block's weights, where a streamed run holds one block's."""
    model = TinyModel(layers=3)
    shape = shape_in_memory(model, tokens=64, sequence_tokens=8, batch_tokens=16)
    assert (shape.blocks, shape.held_blocks, shape.width) == (3, 3, 32)
    assert shape.outer_parameters == model.table.weight.numel()
    inside = sum(p.numel() for p in model.layers.parameters())
    assert shape.block_parameters * 3 == inside
    whole = predict(shape, Recipe(), "cpu", RATES).device_bytes
    streamed = predict(replace(shape, held_blocks=1), Recipe(), "cpu", RATES).device_bytes
    assert whole - streamed == pytest.approx(4 * inside * 2 / 3)
