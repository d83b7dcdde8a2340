"""The quantization benchmark: one pass gives the package's own perplexity and comparison, and other
libraries' files are scored as what their codes stand for."""

from __future__ import annotations

import copy
import importlib
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.perplexity import compare, perplexity
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.linear import replace_linears
from ridgeline.quant.recipe import Recipe
from ridgeline.train.presets import preset

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quant"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench_quantize")


@pytest.fixture
def model() -> Decoder:
    shape = replace(preset("tiny"), vocab_size=64, max_seqlen=1024)
    return Decoder(shape, seed=1).requires_grad_(False)


def test_one_pass_is_perplexity_and_comparison(bench, model) -> None:
    ids = torch.randint(0, 64, (3 * 1024 + 9,), generator=torch.Generator().manual_seed(0))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.1)
    scorer = bench.Scorer(model, ids, windows=2, kl_windows=1)
    assert scorer.before.ppl == pytest.approx(perplexity(model, ids, max_windows=2).ppl, rel=1e-6)
    got = scorer.score(other)
    assert got.ppl == pytest.approx(perplexity(other, ids, max_windows=2).ppl, rel=1e-6)
    want = compare(model, other, ids, max_windows=1)
    assert got.kl == pytest.approx(want.kl, rel=1e-4) and got.kl > 1e-4
    assert got.top1_agreement == pytest.approx(want.top1_agreement)


def test_packed_layers_are_scored_as_their_values(bench, model) -> None:
    layout = GPTQFormat(group_size=32)
    wide = copy.deepcopy(model)
    result = quantize_model(wide, None, Recipe(method="rtn", layout=layout))
    replace_linears(model, result.weights, lambda name: layout, dtype=torch.float32)
    assert not hasattr(model.get_submodule("model.layers.0.mlp.up_proj"), "weight")
    plain = bench.widened(model)
    for name in result.weights:
        weight = plain.get_submodule(name).weight
        assert torch.equal(weight, wide.get_submodule(name).weight), name


def test_every_row_is_planned_once(bench, monkeypatch) -> None:
    """Rounding once a symmetry, then each method for each seed, peers beside ours."""
    monkeypatch.setattr("sys.argv", ["bench", "--final", "--peers", "--seeds", "0", "1"])
    args, rows = bench.arguments(), []

    class Counted:
        def ours(self, method, symmetric, seed, sequences=None):
            rows.append((method, symmetric, seed, sequences))
            return {}

        def theirs(self, peer, variant, method, symmetric, seed, sequences=None):
            rows.append((peer.name, variant, symmetric, seed, sequences))
            return {}

    assert len(list(bench.measured(Counted(), args))) == len(rows) == len(set(rows))
    assert rows[:2] == [("rtn", True, 0, None), ("rtn", False, 0, None)]
    assert len(rows) == 2 + 2 * (4 + 5 + 1)
    assert ("awq+gptq", False, 0, None) in rows and ("awq", False, 0, None) in rows
    # A peer's awq on half of the sequences, and ours on the same ones.
    assert ("llm-compressor", "awq", False, 1, 16) in rows and ("awq", False, 1, 16) in rows
    assert ("llm-compressor", "gptq", False, 1, None) in rows


@pytest.mark.parametrize(("given", "sequences"), [("32", None), ("40", None), ("8", 8)])
def test_how_much_of_the_text_a_peers_awq_gets(bench, monkeypatch, given, sequences) -> None:
    """All of it needs no second row of ours."""
    line = ["bench", "--only-peers", "--peers", "llm-compressor", "--peer-methods", "awq"]
    monkeypatch.setattr("sys.argv", [*line, "--awq-sequences", given])
    args, rows = bench.arguments(), []

    class Counted:
        def ours(self, method, symmetric, seed, sequences=None):
            rows.append((method, sequences))
            return {}

        def theirs(self, peer, variant, method, symmetric, seed, sequences=None):
            rows.append((peer.name, sequences))
            return {}

    list(bench.measured(Counted(), args))
    ours = [] if sequences is None else [("awq", sequences)]
    assert rows == [("rtn", None), ("llm-compressor", sequences), *ours]


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak that can be set back"
)
def test_fresh_peak_memory(bench) -> None:
    """A tensor made after it counts, one that was freed before does not."""
    size = 160 * 2**20

    def pages() -> mmap.mmap:  # not from malloc, which may keep what is freed
        held = mmap.mmap(-1, size)
        for start in range(0, size, 4096):
            held[start] = 1
        return held

    before = pages()
    with_it = bench.PeakMemory("cpu").read()
    before.close()
    peak = bench.PeakMemory("cpu")
    low = peak.read()
    assert low < with_it - 0.8 * size
    after = pages()
    assert peak.read() > low + 0.8 * size
    after.close()
