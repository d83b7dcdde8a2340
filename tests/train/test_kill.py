"""kill -9 in the middle of a save, in a process of its own; the next start goes on exactly."""

import signal
import subprocess
import sys

from ridgeline.train import checkpoint
from ridgeline.train.toml import to_toml
from ridgeline.train.trainer import train
from tests.train.helpers import ROOT, assert_same, curve, tensors_of

KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from ridgeline.train import checkpoint
from ridgeline.train.toml import load_config
from ridgeline.train.trainer import train

write = checkpoint._save_tensors
def dying(path, tensors):
    write(path, tensors)
    if "step-00000004" in str(path) and path.name == "optimizer.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint._save_tensors = dying
train(load_config(sys.argv[1]))
"""


def test_kill_in_mid_save(make_config, tmp_path):
    straight, config = make_config("straight"), make_config()
    result = train(straight)
    expected = curve(straight), tensors_of(result.checkpoint)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = config.run_dir / "checkpoints"
    assert checkpoint.latest(folder) == folder / "step-00000002"
    assert list(folder.glob(".step-00000004.*.tmp"))  # what it left half-written
    assert train(config).resumed_from == 2
    assert not list(folder.glob(".step-*"))
    assert_same(config, expected)
