"""A model in memory with a journal: stopped, it goes on from the last finished block."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.nn.decoder import Decoder
from ridgeline.quant.calibrate import Around, quantize_model
from ridgeline.quant.journal import Journal
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Override, Recipe

from .test_awq import RECIPE, decoder, ids

__all__ = ["ids"]
LAYOUT = CompressedTensorsFormat(group_size=16, symmetric=False)


class _StoppedError(BaseException):
    pass


def around(folder: Path, recipe: Recipe, stop: int | None = None) -> Around:
    """stop: the index of the block after which the run ends, before it counts."""
    journal = Journal(folder, {"run": repr(recipe)}, recipe, Ranks(), torch.device("cpu"))

    def on_block(index: int, weights: dict) -> None:
        if index == stop:
            raise _StoppedError

    return Around(journal=journal, on_block=on_block)


@pytest.mark.parametrize("method", ["rtn", "awq", "awq+gptq"])
@pytest.mark.parametrize("stop", [1, 2])
def test_it_goes_on_with_the_same_bits(ids, tmp_path, method: str, stop: int) -> None:
    """Biases, folded norms, a skipped layer and the head (block 2) are all put back."""
    recipe = replace(
        RECIPE,
        method=method,
        layout=LAYOUT,
        lm_head=True,
        overrides=(Override(pattern="1.mlp.up", skip=True),),
    )
    exact = decoder()
    whole = quantize_model(exact, ids, recipe)
    with pytest.raises(_StoppedError):
        quantize_model(decoder(), ids, recipe, around=around(tmp_path / "kept", recipe, stop))
    model, done = decoder(), []
    going_on = around(tmp_path / "kept", recipe)
    assert going_on.journal is not None
    assert going_on.journal.finished == {1: 1, 2: 3}[stop]  # the head counts before it is told
    going_on = replace(going_on, on_block=lambda index, weights: done.append(index))
    result = quantize_model(model, ids, recipe, around=going_on)
    assert done == list(range(stop, 3))
    assert result.weights.keys() == whole.weights.keys()
    for name, weight in whole.weights.items():
        assert torch.equal(weight.code_NK, result.weights[name].code_NK), name
        assert torch.equal(weight.scale_NR, result.weights[name].scale_NR), name
    assert [report.name for report in result.reports] == [report.name for report in whole.reports]
    same_parameters(model, exact)


def test_a_finished_run_is_only_read(ids, tmp_path) -> None:
    recipe = replace(RECIPE, method="gptq", layout=LAYOUT, lm_head=True)
    exact, model = decoder(), decoder()
    whole = quantize_model(exact, ids, recipe, around=around(tmp_path / "kept", recipe))
    again = quantize_model(model, ids, recipe, around=around(tmp_path / "kept", recipe))
    assert again.weights.keys() == whole.weights.keys() and "lm_head" in again.weights
    same_parameters(model, exact)


def same_parameters(model: Decoder, exact: Decoder) -> None:
    """Weights are those of the codes; biases as far as the stored dtype holds them."""
    for (name, got), (_, want) in zip(
        model.named_parameters(), exact.named_parameters(), strict=True
    ):
        loose = 1e-3 if name.endswith("bias") else 0.0
        torch.testing.assert_close(got, want, rtol=loose, atol=loose, msg=name)


def test_two_processes_do_not_work_in_one_folder(ids, tmp_path) -> None:
    """The second is told; when the first has ended, killed or not, the next goes on."""
    folder = tmp_path / "kept"
    code = (
        "import sys; from pathlib import Path; from ridgeline.quant import journal\n"
        f"lock = journal._locked(Path({str(folder)!r}))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="kept must belong to one run, got another process"):
            around(folder, RECIPE)
        other.kill()
    journal = around(folder, RECIPE).journal
    assert journal is not None
    assert {path.name for path in folder.iterdir()} == {".lock", "run.json"}
    journal.remove()
    assert not folder.exists()


def test_a_run_started_over_keeps_nothing_but_its_lock(ids, tmp_path, capsys) -> None:
    folder = tmp_path / "kept"
    with pytest.raises(_StoppedError):
        quantize_model(decoder(), ids, RECIPE, around=around(folder, RECIPE, 1))
    assert (folder / "done-00000").is_file()
    around(folder, replace(RECIPE, method="rtn"))
    assert {path.name for path in folder.iterdir()} == {".lock", "run.json"}
