"""The quickstart's 4-bit stage, killed in the middle of GPTQ, goes on where it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.cli.stage import Context, QuickstartConfig
from ridgeline.cli.stages import perplexity, quantize
from ridgeline.core import env
from ridgeline.core.text import split_documents
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_config, save_pretrained
from ridgeline.quant.journal import Journal

ROOT = Path(__file__).parents[2]
DOCUMENTS = [f"The {i} foxes jump over {i + 1} lazy dogs, then rest. " * 4 for i in range(90)]
KILL = """
import os, signal, sys
from pathlib import Path
from tests.cli import test_stage_quantize as here
from ridgeline.cli.stages import perplexity, quantize
from ridgeline.quant.journal import Journal
for stage in (perplexity, quantize):
    stage.wiki_split = lambda: here.split_documents(here.DOCUMENTS)
quantize.GROUP = 32
keep = Journal.keep
def kill(self, model, result, *rest):
    if result.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    keep(self, model, result, *rest)
Journal.keep = kill
quantize.run(here.context_of(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def context_of(model: Path, folder: Path, **changes) -> Context:
    """A run whose earlier stages are done."""
    said = {"finished": "2026-01-01 00:00:00 UTC"}
    config = QuickstartConfig(windows=1, calibration_sequences=2, device="cpu", **changes)
    scored = {"ppl": 300.0, "tokens": 1023, "window": 1024}
    results = {"weights": {"folder": str(model), "bytes": 1000} | said, "perplexity": scored | said}
    return Context(config=config, folder=folder, device="cpu", results=results)


@pytest.fixture
def tiny(model_folder, tmp_path, monkeypatch) -> Path:
    """The tiny model with a context that the stage's windows fit."""
    for stage in (perplexity, quantize):
        monkeypatch.setattr(stage, "wiki_split", lambda: split_documents(DOCUMENTS))
    monkeypatch.setattr(quantize, "GROUP", 32)
    shape = replace(load_config(model_folder), max_seqlen=2048)
    save_pretrained(Decoder(shape, seed=2), tmp_path / "model", tokenizer_from=model_folder)
    return tmp_path / "model"


@pytest.fixture
def calls(monkeypatch) -> list:
    """Blocks that are solved and perplexities that are measured, in order."""
    seen: list = []
    keep, measure = Journal.keep, quantize.measure

    def kept(self, model, result, *rest):
        seen.append(result.index)
        keep(self, model, result, *rest)

    def measured(opened, context, label):
        seen.append(label)
        return measure(opened, context, label)

    monkeypatch.setattr(Journal, "keep", kept)
    monkeypatch.setattr(quantize, "measure", measured)
    return seen


def test_killed_in_gptq_it_redoes_one_block(tiny, tmp_path, calls):
    """kill -9 in the second of two blocks: plain rounding is not measured again, the first block
    not solved again, and the result is that of a run that nothing stopped."""
    killed = subprocess.run(
        [sys.executable, "-c", KILL, str(tiny), str(tmp_path / "run")], cwd=ROOT,
        env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"), capture_output=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = quantize.run(context_of(tiny, tmp_path / "run"))
    assert calls == [1, "perplexity of GPTQ"]
    calls.clear()
    whole = quantize.run(context_of(tiny, tmp_path / "whole"))
    assert calls == ["perplexity of RTN", 0, 1, "perplexity of GPTQ"]
    for name in ("ppl_rtn", "ppl_gptq", "calibration_tokens", "bytes_after"):
        assert result[name] == pytest.approx(whole[name], rel=1e-5), name
    assert list((tmp_path / "run" / "results").iterdir()) == []


def test_interrupted_after_gptq_it_only_measures(tiny, tmp_path, calls, monkeypatch):
    """The folder stands; the last perplexity is what is left. `redo` starts anew."""
    opened = quantize.open_model

    def stop(folder, *rest):
        if folder.name.startswith("smollm2"):
            raise KeyboardInterrupt
        return opened(folder, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(quantize, "open_model", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize.run(context_of(tiny, tmp_path / "run"))
    calls.clear()
    with monkeypatch.context() as patched:
        patched.setattr(quantize, "open_model", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize.run(context_of(tiny, tmp_path / "run", redo=("quantize",)))
    assert calls == ["perplexity of RTN", 0, 1]
    calls.clear()
    quantize.run(context_of(tiny, tmp_path / "run"))
    assert calls == ["perplexity of GPTQ"]
