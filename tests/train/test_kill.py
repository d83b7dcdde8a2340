"""kill -9 in the middle of a save, in a process of its own; the next start goes on exactly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings

from ridgeline.train import checkpoint
from ridgeline.train.trainer import train
from tests.train.helpers import assert_same, curve, tensors_of


def train_and_die(config) -> None:
    """Train, and be killed when the second checkpoint is half-written."""
    write = checkpoint._save_tensors

    def dying(path, tensors):
        write(path, tensors)
        if "step-00000004" in str(path) and path.name == "optimizer.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._save_tensors = dying
    train(config)


def test_kill_in_mid_save(make_config):
    straight, config = make_config("straight"), make_config()
    result = train(straight)  # also tokenizes: a forked process must start no threads
    expected = curve(straight), tensors_of(result.checkpoint)
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(config,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the test runner's threads
        process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    folder = config.run_dir / "checkpoints"
    assert checkpoint.latest(folder) == folder / "step-00000002"
    assert list(folder.glob(".step-00000004.*.tmp"))  # what it left half-written
    assert train(config).resumed_from == 2
    assert not list(folder.glob(".step-*"))
    assert_same(config, expected)
