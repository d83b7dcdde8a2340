"""`warmup`: which kernels it asks for, what it says, and machines that cannot compile."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from ridgeline.cli import main as cli
from ridgeline.cli import warmup as module
from ridgeline.cli.warmup import WarmupConfig, warmup
from ridgeline.core import env
from ridgeline.core.arch import pretend
from ridgeline.engine.weights import linear_shapes, weights_of
from ridgeline.kernels.attention import cute_sm90_backward_config, cute_sm90_config
from ridgeline.kernels.w4a16.config import launch_for
from ridgeline.kernels.w4a16.problem import W4A16Problem
from tests.engine.conftest import tiny_decoder, write_model
from tests.engine.test_quantized import write as write_quantized

SM90 = pretend("sm90")
SMALL = "--arch sm90 --head-dims 64 --masks causal --layouts dense --layers 4096x4096"


@pytest.fixture
def compiled(monkeypatch):
    """The compilers replaced by ones that write an empty file and note what they were asked."""
    asked = []

    def write(name):
        file = env.cache_dir() / "cute" / f"{name}.so"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.touch()
        return file

    def warm(problems, arch):
        asked.extend(problems)
        names = []
        for problem in problems:
            config = cute_sm90_config.forward_config(problem, arch)
            if problem.direction == "bwd":
                config = cute_sm90_backward_config.backward_config(problem, arch)
            names.append(abs(hash((cute_sm90_config.forward_traits(problem), config))))
        return [write(name) for name in names]

    def compile_kernel(config):
        asked.append(config)
        return write(abs(hash(config)))

    attention, w4a16 = ModuleType("fake_attention"), ModuleType("fake_w4a16")
    vars(attention)["warm"], vars(w4a16)["compile_kernel"] = warm, compile_kernel
    monkeypatch.setitem(sys.modules, "fake_attention", attention)
    monkeypatch.setitem(sys.modules, "fake_w4a16", w4a16)
    monkeypatch.setattr(module, "_ATTENTION", "fake_attention")
    monkeypatch.setattr(module, "_W4A16", "fake_w4a16")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name in module.PACKAGES or find(name)
    )
    return asked


def test_each_kernel_is_compiled_once_and_then_found(compiled, capsys):
    first = warmup(WarmupConfig(arch="sm90", head_dims=(64,), layers=("4096x4096",)))
    count = len(first["kernels"])
    assert first["compiled"] == count == len(compiled) > 6
    assert {row["op"] for row in first["kernels"]} == {"attention", "w4a16"}
    assert len({row["file"] for row in first["kernels"]}) == count
    assert cli.main(["warmup", *SMALL.split()]) == 0
    assert f"0 compiled in 0 s, {count - 7} were there" in capsys.readouterr().out


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_every_length_finds_its_attention_compiled(dim):
    masks = ("full", "causal", "window")
    config = WarmupConfig(arch="sm90", ops=("attention",), head_dims=(dim,), masks=masks)
    found = {_kernel(job.argument) for job in module.attention_jobs(config, SM90)}
    base = next(module.attention_jobs(config, SM90)).argument
    lengths = (100, 512, 1000, 1024, 1025, 2048, 2049, 3000, 4096, 4097, 8192, 16384, 131072)
    for length, mask, direction in itertools.product(lengths, masks, ("fwd", "bwd")):
        left = 1023 if mask == "window" else None
        problem = replace(
            base, seqlen_q=length, seqlen_k=length, causal=mask != "full", window_left=left,
            direction=direction,
        )  # fmt: skip
        assert _kernel(problem) in found, (length, mask, direction)


def _kernel(problem):
    if problem.direction == "bwd":
        config = cute_sm90_backward_config.backward_config(problem, SM90)
        return cute_sm90_backward_config.backward_traits(problem), config
    traits = cute_sm90_config.forward_traits(problem)
    return traits, cute_sm90_config.forward_config(problem, SM90)


def test_flags_are_the_problems(compiled):
    flags = {"ops": ("attention",), "head_dims": (64, 96), "dtypes": ("float16",), "arch": "sm90"}
    warmup(WarmupConfig(**flags, masks=("full", "window"), layouts=("varlen",), softcap=True))
    seen = [(p.head_dim, p.causal, p.window_left, p.direction) for p in compiled]
    masks, directions = ((False, None), (True, 1024)), ("fwd", "bwd")
    assert seen == [(d, *mask, way) for d in (64, 96) for mask in masks for way in directions]
    assert all(p.varlen and p.softcap and not p.sinks for p in compiled)
    assert {p.dtype for p in compiled} == {"float16"}


@pytest.mark.parametrize("layer", ["4096x4096", "8192x28672", "28672x8192"])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_layer_finds_its_kernels_compiled(layer, invariant):
    k, n = map(int, layer.split("x"))
    problem = W4A16Problem(m=1, n=n, k=k, group_size=128, batch_invariant=invariant)
    found = module.layer_kernels(problem, SM90)
    for m in (*range(1, 65), 100, 128, 129, 256, 257, 500, 1000, 2048, 3000, 8192):
        assert launch_for(replace(problem, m=m), SM90).config in found, m


def test_a_model_finds_its_joined_layers_compiled(compiled):
    """A preset's matmuls as the engine joins them, gate and up with their epilogue."""
    warmup(WarmupConfig(arch="sm90", ops=("w4a16",), model="llama-8b", scale_dtype="bfloat16"))
    shapes = [(4096, 6144, False), (4096, 4096, False), (4096, 28672, True), (14336, 4096, False)]
    for k, n, silu in shapes:
        for m in (1, 8, 16, 64, 1024):
            problem = W4A16Problem(
                m=m, n=n, k=k, group_size=128, scale_dtype="bfloat16", silu_mul=silu
            )
            assert launch_for(problem, SM90).config in compiled, problem


def test_a_quantized_folder_says_how_its_layers_are_stored(tmp_path):
    folder = write_model(tmp_path / "plain")
    plain = module.of_model(WarmupConfig(model=str(folder)))
    assert plain.layers == ("64x128", "64x64", "64x384:silu", "192x64")
    assert (plain.head_dims, plain.group_sizes, plain.symmetric) == ((16,), (128,), True)
    write_quantized(tmp_path / "w4", folder, "bfloat16")
    found = module.of_model(WarmupConfig(model=str(tmp_path / "w4")))
    assert found.layers == plain.layers and found.group_sizes == (32,)
    assert (found.scale_dtype, found.symmetric) == ("bfloat16", True)
    with pytest.raises(ValueError, match=r"group_sizes must be \(32,\), the model's, got \(64,\)"):
        module.of_model(WarmupConfig(model=str(tmp_path / "w4"), group_sizes=(64,)))


def test_linear_shapes_are_the_joined_ones():
    weights = weights_of(tiny_decoder())
    layer = weights.layers[0]
    dense = [tuple(linear.weight_NK.shape) for linear in layer.linears()]
    assert dense == [(shape.n, shape.k) for shape in linear_shapes(weights.config)]


def test_json(compiled, capsys):
    assert cli.main(["warmup", *SMALL.split(), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["event"] == "result" and lines[-1]["arch"] == "sm90"
    assert lines[-2]["task"] == "warmup" and lines[-2]["done"] == lines[-2]["total"]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--arch sm80", 2, "arch must be sm90, got sm80"),
        ("--arch sm90 --workers 0", 2, "workers must be at least 1, got 0"),
        ("--arch sm90 --head-dims 0", 2, "--head-dims must be positive"),
        ("--arch sm90 --head-dims 20", 2, "head dims must be multiples of 8"),
        ("--arch sm90 --layers 4096", 2, "layers must be inputs x outputs, got '4096'"),
        ("--arch sm90 --model nothing", 1, "config.json must exist, got none"),
        (
            "--arch sm90 --model llama-8b --head-dims 96",
            2,
            "--head-dims must be (128,), the mod",
        ),
        ("--arch sm90 --ops w4a16 --group-sizes 48", 2, "takes groups of 32, 64, 128, 256"),
    ],
)
def test_bad_input(compiled, capsys, words, code, part):
    assert cli.main(["warmup", *words.split()]) == code
    said = capsys.readouterr()
    assert part in said.err and said.out == "" and compiled == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_architecture_must_be_said(compiled, capsys):
    assert cli.main(["warmup"]) == 2
    assert "pass --arch sm90" in capsys.readouterr().err and compiled == []


def test_without_the_dsl_it_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", {"no_such_module": "nvidia-cutlass-dsl"})
    assert cli.main(["warmup", "--arch", "sm90"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "needs nvidia-cutlass-dsl, not installed here; run pip install" in said.err


def test_without_a_linker_it_is_one_line(compiled, capsys, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert cli.main(["warmup", "--arch", "sm90"]) == 1
    assert "install gcc or clang" in capsys.readouterr().err and compiled == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the DSL is not installed")
def test_kernels_for_real(capsys):
    words = f"{SMALL} --ops attention --json"
    for compiled in (1, 0):
        assert cli.main(["warmup", *words.split()]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["compiled"] == compiled
