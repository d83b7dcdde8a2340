"""Two processes calibrate together (gloo): the same codes, folds and figures as one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.core import env
from ridgeline.quant.calibrate import Around, quantize_model
from ridgeline.quant.evaluate import Evaluation
from ridgeline.quant.ranks import Ranks

from .test_awq import RECIPE, decoder

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
from safetensors.torch import save_file
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from tests.quant.test_ranks import run
from ridgeline.quant.ranks import Ranks
ranks = Ranks.join(torch.device("cpu"))
save_file(run(ranks), f"{sys.argv[2]}/rank{ranks.rank}.safetensors")
ranks.leave()
"""


def run(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Codes, scales and measured figures of a run on 14 sequences of 24 tokens, four batches (the
    last one short)."""
    model = decoder()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (14, 24), generator=generator)
    held_out = torch.randint(0, 61, (3, 20), generator=generator)
    around = Around(evaluation=Evaluation(model, held_out, ranks), ranks=ranks)
    done = quantize_model(model, ids, RECIPE_BOTH, around=around)
    assert done.calibration_tokens == 14 * 24 and done.evaluation is not None
    found = {f"{name}.code": weight.code_NK for name, weight in done.weights.items()}
    found |= {f"{name}.scale": weight.scale_NR for name, weight in done.weights.items()}
    said = done.evaluation
    figures = [said.ppl_before, said.ppl_after, said.kl, said.top1_agreement, float(said.tokens)]
    found["figures"] = torch.tensor(figures, dtype=torch.float64)
    return found


RECIPE_BOTH = RECIPE.__class__(
    method="awq+gptq", layout=RECIPE.layout, awq=RECIPE.awq, batch_sequences=4
)


@pytest.mark.dist
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path)],
            env=env.child_environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
            cwd=ROOT, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    alone = run(Ranks())
    for rank in range(2):
        together = load_file(tmp_path / f"rank{rank}.safetensors")
        assert together.keys() == alone.keys()
        for name, tensor in alone.items():
            if name == "figures":
                torch.testing.assert_close(together[name], tensor, rtol=1e-9, atol=1e-12)
            else:
                assert torch.equal(together[name], tensor), name
