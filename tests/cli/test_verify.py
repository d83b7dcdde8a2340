"""`ridgeline verify` on processes that it starts, and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.verify import TinyShape, workload
from ridgeline.core.env import child_environment
from ridgeline.parallel import fsdp
from ridgeline.parallel.layout import Layout, check_layout

pytestmark = pytest.mark.dist


def test_equal_layouts_say_so(capsys):
    assert cli.main(["verify", "--layout.tp", "2", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "TP2 on 2 ranks equals one process in fp32" in said
    assert "step 1: loss 4.2" in said and "largest difference" in said


def test_json_has_the_numbers(capsys):
    assert cli.main(["verify", "--layout.cp", "2", "--steps", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] and result["ranks"] == 2
    assert result["losses"][0] == pytest.approx(result["reference_losses"][0], rel=1e-5)


def test_a_difference_is_an_exit_code_and_named(capsys, monkeypatch):
    original = fsdp.local_gradient

    def halved(parameter):
        gradient = original(parameter)
        return None if gradient is None else gradient / 2

    monkeypatch.setattr(fsdp, "local_gradient", halved)
    assert cli.main(["verify", "--layout.dp-shard", "2", "--steps", "1"]) == 1
    said = capsys.readouterr().err
    assert "DP2 (ZeRO-3) differs from one process in step 0: gradient norm by 5.0e-01" in said
    assert "first model.embed_tokens.weight" in said


def test_a_misfit_is_said_once(capsys):
    flags = ["--layout.tp", "2", "--shape.num-heads", "9", "--shape.num-kv-heads", "3"]
    assert cli.main(["verify", *flags]) == 2
    assert capsys.readouterr().err.count("tp must divide the 9 query heads, got 2") == 1


def _torchrun(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "-m", "ridgeline", "verify", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment(OMP_NUM_THREADS="1"),
    )


def test_under_torchrun_one_rank_speaks():
    done = _torchrun("--layout.pp", "2", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PP2 (1f1b) on 2 ranks equals one process") == 1


def test_under_torchrun_a_wrong_product_ends_all_ranks():
    done = _torchrun("--layout.pp", "2", "--layout.tp", "2")
    assert done.returncode != 0
    assert done.stderr.count("sizes must multiply to the number of ranks (2)") == 1


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_tiny_shape_fits_any_layout(tp, pp):
    layout = Layout(tp=tp, pp=pp, sequence_parallel=tp > 1)
    shape = TinyShape().fitted(layout, 32 * tp)
    work = workload(shape, 32 * tp, num_microbatches=layout.num_stages)
    assert check_layout(layout, work, world_size=tp * pp) == []
