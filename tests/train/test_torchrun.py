"""The real launcher, end to end: torchrun starts ranks, SIGTERM stops and saves, the next one goes
on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from ridgeline.core import env
from ridgeline.parallel.checkpoint import newest_whole
from ridgeline.train.metrics import read_rows
from tests.train.helpers import ROOT
from tests.train.test_kill import words

pytestmark = pytest.mark.dist


def start(line: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", "-m", "ridgeline", *line],
        env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_torchrun_and_sigterm(make_config):
    config = make_config()
    line = words(config, "--layout.pp", "2", "--checkpoint.every-steps", "0", "--steps", "400")
    process = start(line)
    try:
        end = time.monotonic() + 120
        while len(read_rows(config.run_dir)) < 4 and time.monotonic() < end:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    found = newest_whole(config.run_dir / "checkpoints")
    assert found is not None, said
    step = found[1]["step"]
    assert 3 <= step < 400 and read_rows(config.run_dir)[-1]["step"] == step
    assert said.count(f"train: interrupted; {found[0]} is kept") == 1, said
    assert found[1]["facts"]["ranks"] == 2
