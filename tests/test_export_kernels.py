"""Finding and compiling ahead what GPU tests ask for: nothing is missed, nothing done twice."""

from __future__ import annotations

import fcntl
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_cached_config as cached
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.kernels.w4a16 import config as configs
from tests import export_kernels
from tests.export_kernels import EVERYTHING, TESTS, asked_by, main, wanted

H200 = KNOWN["sm90"]
HERE = all(importlib.util.find_spec(name) for name in ("cutlass", "tvm_ffi"))
TRAITS = configs.Traits(kind="bf16", scale="f16", symmetric=True, packed_group=128)


def attention_kernel(head_dim: int, **changes: object) -> list:
    fields = dict(batch=1, seqlen_q=4096, seqlen_k=4096, heads=4, kv_heads=4) | changes
    problem = AttentionProblem(head_dim=head_dim, head_dim_v=head_dim, causal=True, **fields)
    key = cached.forward_key(problem, H200)
    return ["attention", *([type(record).__name__, asdict(record)] for record in key)]


def w4a16_kernel() -> list:
    config = configs.decode_launch(TRAITS, 1, 4096, 4096, 132, False).config
    return ["w4a16", [type(config).__name__, asdict(config)]]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A list of three kernels, and an empty cache."""
    monkeypatch.setenv("RIDGELINE_CACHE", "")  # `main` sets it; put back afterwards
    paged = attention_kernel(128, seqlen_q=1, seqused=True, page_size=16)
    kernels = [attention_kernel(64), paged, w4a16_kernel()]
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"kernels": kernels, "early": []}))
    return file, tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list:
    """The keys that were compiled, which writes a file."""
    keys: list = []

    class Compiler:
        @staticmethod
        def compile_kernel(*key: object) -> None:
            keys.append(key)
            paths[key].write_bytes(b"library")

    paths: dict[tuple, Path] = {}

    def remember(kernel: list) -> export_kernels.Wanted:
        found = wanted(kernel)
        paths[found.key] = found.path
        return found

    monkeypatch.setattr(export_kernels, "wanted", remember)
    monkeypatch.setattr(export_kernels.importlib, "import_module", lambda name: Compiler)
    return keys


def test_compiles_once_and_goes_on(listed, compiled, capsys):
    file, folder = listed
    assert main([str(file), "--cache", str(folder)]) == 0 and len(compiled) == 3
    names = sorted(path.name for path in folder.rglob("*.so"))
    assert len(names) == 3 and sum(name.startswith("attention_fwd") for name in names) == 2
    next(folder.rglob("w4a16_*.so")).unlink()
    assert main([str(file), "--cache", str(folder), "--reverse"]) == 0
    assert len(compiled) == 4 and compiled[-1] == compiled[2]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"kernels": 3, "left": [], "failed": [], "wrong": [], "early": []}


def test_known_kernels_are_copied(listed, compiled, tmp_path):
    file, folder = listed
    main([str(file), "--cache", str(folder)])
    compiled.clear()
    other = tmp_path / "other"
    assert main([str(file), "--cache", str(other), "--have", str(folder)]) == 0
    assert compiled == [] and len(list(other.rglob("*.so"))) == 3


def test_a_kernel_that_fails_stops_no_other(listed, compiled, monkeypatch, capsys):
    file, folder = listed
    whole = export_kernels.importlib.import_module("")

    class Broken:
        @staticmethod
        def compile_kernel(*key: object) -> None:
            if len(compiled) == 1:
                compiled.append(key)
                raise ValueError("no such instruction")
            whole.compile_kernel(*key)

    monkeypatch.setattr(export_kernels.importlib, "import_module", lambda name: Broken)
    assert main([str(file), "--cache", str(folder)]) == 1 and len(compiled) == 3
    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    assert last["failed"] == last["left"] and len(last["left"]) == 1
    assert "failed: ValueError: no such instruction" in said


def test_what_another_process_compiles_is_left_to_it(listed, compiled, monkeypatch):
    file, folder = listed
    monkeypatch.setenv("RIDGELINE_CACHE", str(folder))
    kernels = [wanted(kernel) for kernel in json.loads(file.read_text())["kernels"]]
    kernels[0].path.parent.mkdir(parents=True)
    with open(kernels[0].path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([str(file), "--cache", str(folder)]) == 1  # one is left
    assert kernels[0].key not in compiled and len(compiled) == 2


@pytest.mark.skipif(not HERE, reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
def test_a_gpu_test_asks_for_what_it_runs_on_a_gpu():
    [file] = [name for name in TESTS if "attention" in name]
    kernels, early = asked_by([f"{file}::test_launches_on_the_current_stream_and_in_a_graph"])
    assert early == [] and kernels == [json.loads(json.dumps(attention_kernel(128)))]


def test_everything_names_what_there_is():
    root = Path(export_kernels.__file__).parents[1]
    benchmarks = root / "benchmarks/kernels/attention"
    said = "".join(
        (benchmarks / f"verify_hopper{n}.py").read_text() for n in ("", "_cached", "_tail")
    )
    for what in EVERYTHING:
        if ".py" in what:
            assert (root / what).exists() and "mark.gpu" in (root / what).read_text()
        elif what != "bench":
            assert f"def group_{what}(" in said or f'"{what}": ' in said, what
