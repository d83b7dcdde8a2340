import dataclasses
import json
import subprocess
import sys
import types

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.train import metrics
from ridgeline.train.config import PRESET_NAMES, LogConfig
from ridgeline.train.metrics import (
    Meter,
    MetricsLog,
    peak_memory_bytes,
    peak_note,
    peak_of,
    step_flops,
)
from ridgeline.train.presets import PRESETS, preset


def test_flops_of_a_step_by_hand():
    tiny = preset("tiny")  # C 64, F 192, L 2, H 4, G 2, D 16, V 257
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192
    linears = 6 * (2 * layer + 257 * 64)
    pair = 12 * 2 * 4 * 16  # forward and backward of one query-key pair over layers and heads
    pairs = 5 * 6 // 2 + 2 * (3 * 4 // 2)
    assert step_flops(tiny, [3, 5, 3], 11, causal=True) == linears * 11 + pair * pairs
    assert step_flops(tiny, [3, 5, 3], 11, causal=False) == linears * 11 + pair * 11 * 11


def test_presets_have_their_published_sizes():
    millions = {name: shape.num_params() / 1e6 for name, shape in PRESETS.items()}
    assert tuple(millions) == PRESET_NAMES
    assert round(millions["smollm2-135m"], 1) == 134.5
    assert round(millions["llama-1b"]) == 1236
    assert round(millions["llama-3b"]) == 3213
    assert round(millions["llama-8b"]) == 8030
    assert round(millions["llama-70b"]) == 70554
    with pytest.raises(ValueError, match=r"train: model.preset must be one of tiny, .*got 'big'"):
        preset("big")


def test_peak_is_named(cache):
    device = torch.device("cpu")
    assert peak_of(device, "float32", 989.0) == (989.0, "log.peak_tflops")
    value, source = peak_of(device, "float32", None)
    assert value > 0 and "float32 matmul" in source and "not measured here" in source


@pytest.mark.parametrize(
    ("name", "dtype", "peak", "wanted"),
    [
        ("NVIDIA H200", "bfloat16", 790.0, "the datasheet's 989: this one times 0.80"),
        ("NVIDIA H200", "bfloat16", 989.0, "the datasheet's rate"),
        ("NVIDIA H200", "float32", 50.0, ""),
        ("NVIDIA A100", "bfloat16", 250.0, ""),
    ],
)
def test_a_peak_is_set_beside_the_published_one(monkeypatch, name, dtype, peak, wanted):
    monkeypatch.setattr(metrics.arch, "detect", lambda device: types.SimpleNamespace(device=name))
    note = peak_note(torch.device("cuda", 0), dtype, peak)
    assert wanted in note and bool(note) == bool(wanted)
    assert peak_note(torch.device("cpu"), dtype, peak) == ""


def test_peak_memory_grows_with_what_is_held():
    """In a process of its own: what this one held before does not hide the growth."""
    script = (
        "import torch\n"
        "from ridgeline.train.metrics import peak_memory_bytes\n"
        "before = peak_memory_bytes(torch.device('cpu'))\n"
        "held = torch.ones(200 * 2**20 // 4)\n"
        "print(before, peak_memory_bytes(torch.device('cpu')) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, grown = map(int, done.stdout.split())
    assert 50 * 2**20 < before < 8 * 2**30
    assert 120 * 2**20 < grown < 240 * 2**20


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_resident_set(monkeypatch, platform, factor):
    monkeypatch.setattr(metrics, "_high_water_kib", lambda: None)
    monkeypatch.setattr(metrics.sys, "platform", platform)
    monkeypatch.setattr(
        metrics.resource, "getrusage", lambda _: types.SimpleNamespace(ru_maxrss=12345)
    )
    assert peak_memory_bytes(torch.device("cpu")) == 12345 * factor


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rows_after_the_resumed_step_go(tmp_path):
    log = MetricsLog(tmp_path, LogConfig(), 0)
    for step in range(1, 6):
        log.write("train", step, loss=float(step))
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # cut by a crash
    log = MetricsLog(tmp_path, LogConfig(), 3)
    log.write("train", 4, loss=40.0)
    log.close()
    assert [(r["step"], r["loss"]) for r in rows_of(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    MetricsLog(tmp_path, LogConfig(), 0).close()
    assert rows_of(tmp_path) == []


def test_a_full_disk_is_one_line(tmp_path):
    log = MetricsLog(tmp_path, LogConfig(), 0)
    log._file.close()
    log._file = open("/dev/full", "a", encoding="utf-8")
    with pytest.raises(UserError, match=r"could not write metrics.jsonl: No space left on device"):
        log.write("train", 1, loss=1.0)
    log.close()


def test_tensorboard_is_refused_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        MetricsLog(tmp_path, LogConfig(tensorboard=True), 0)


def test_tensorboard_gets_the_numbers(monkeypatch, tmp_path):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setattr(metrics, "require_tensorboard", lambda: Writer)
    log = MetricsLog(tmp_path, LogConfig(tensorboard=True), 3)
    log.write("train", 4, loss=0.5, peak_source="text is no scalar")
    log.close()
    assert written == [(str(tmp_path / "tensorboard"), 4), ("train/loss", 0.5, 4), "closed"]


def test_meter_rates(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 21.0, 30.0, 34.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    tiny = dataclasses.replace(preset("tiny"), num_layers=1)
    meter = Meter(tiny, 8, peak_tflops=1e-3)
    for _ in range(2):
        meter.start()
        meter.stop([3, 5])
    rates = meter.read()
    assert rates["step_s"] == 1.5 and rates["tokens_per_s"] == 16 / 3.0
    for causal, key in ((True, "mfu_causal"), (False, "mfu_noncausal")):
        flops = 2 * step_flops(tiny, [3, 5], 8, causal=causal)
        assert rates[key] == pytest.approx(flops / 3.0 / 1e9)
    assert rates["mfu_causal"] < rates["mfu_noncausal"]
    meter.start()
    meter.stop([8])
    assert meter.read()["tokens_per_s"] == 2.0
