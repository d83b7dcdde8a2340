"""The runner of GPU tests: spoiled groups are taken apart, nothing is lost silently."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from queue import Queue

import pytest

from tests import run_gpu
from tests.run_gpu import Case, Job, Settings

FILE = "tests/test_fake.py"
FAKE = """
import os, pathlib, warnings
import pytest
pytestmark = pytest.mark.gpu
poisoned = False

@pytest.mark.parametrize("n", range(2))
def test_spoiled(n):
    # the first poisons its process, as an illegal access does; alone the other passes
    global poisoned
    if n == 0:
        poisoned = True
        assert os.environ.get("CUDA_LAUNCH_BLOCKING") is None, "an illegal access"
    assert not poisoned, "sticky"

def test_warns():
    warnings.warn("of another PyTorch", DeprecationWarning)

def test_dies():
    os._exit(3)

@pytest.mark.skip(reason="needs two GPUs")
def test_skipped():
    pass

@pytest.mark.skipif(False, reason="")
def test_fine():
    assert pathlib.Path("pyproject.toml").exists()
"""
CONFIG = """
[tool.pytest.ini_options]
addopts = "-q -m 'not gpu'"
markers = ["gpu: x"]
filterwarnings = ["error"]
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / FILE).write_text(FAKE)
    (tmp_path / "tests" / "test_other.py").write_text("raise ImportError('not collected')")
    (tmp_path / "pyproject.toml").write_text(CONFIG)
    return Settings(
        root=tmp_path,
        workers=2,
        pytest_args=("-p", "no:cacheprovider"),
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_spoiled_groups_are_taken_apart(tree, tmp_path):
    ids, broken = run_gpu.collect(tree)
    assert len(ids) == 6 and not broken  # files without the mark are not imported
    cases = {case.id.split("::")[1]: case for case in run_gpu.run_all(tree, ids)}
    outcomes = {name: case.outcome for name, case in cases.items()}
    assert outcomes == {
        "test_spoiled[0]": "failed",
        "test_spoiled[1]": "alone",
        "test_warns": "warning",
        "test_dies": "lost",
        "test_skipped": "skipped",
        "test_fine": "passed",
    }
    assert "an illegal access" in cases["test_spoiled[0]"].message
    assert cases["test_warns"].message == "DeprecationWarning: of another PyTorch"
    assert cases["test_dies"].message == "ended with status 3"
    assert cases["test_skipped"].message == "needs two GPUs"
    said = run_gpu.table(list(cases.values()), {"tests/x.py": "ModuleNotFoundError: tyro"})
    assert "not collected: ModuleNotFoundError: tyro" in said
    assert "lost    tests/test_fake.py::test_dies  ended with status 3" in said


def test_a_file_that_cannot_be_imported_is_named(tree):
    (tree.root / "tests" / "test_broken.py").write_text("import tyro_  # mark.gpu\n")
    ids, broken = run_gpu.collect(tree)
    assert len(ids) == 6
    assert broken == {"tests/test_broken.py": "ModuleNotFoundError: No module named 'tyro_'"}


def test_what_hangs_is_killed(tree):
    (tree.root / FILE).write_text(
        "import pytest, time\n@pytest.mark.gpu\ndef test_hangs():\n    time.sleep(3600)\n"
    )
    tree.alone_seconds = 2.0
    job = Job((f"{FILE}::test_hangs",), alone=True)
    found = run_gpu.run_job(tree, job, time.monotonic() + 60)
    assert found[job.ids[0]].outcome == "lost"
    assert found[job.ids[0]].message == "killed after 2 s"


def test_devices_are_shared_out(tree, tmp_path):
    (tree.root / FILE).write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.gpu\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_says(n):\n"
        f"    path = pathlib.Path({str(tmp_path)!r}, 'seen' + str(n))\n"
        "    path.write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    settings = replace(tree, devices=("3", "GPU-5"), group=1, free=Queue())
    cases = run_gpu.run_all(settings, [f"{FILE}::test_says[{n}]" for n in range(4)])
    assert {case.outcome for case in cases} == {"passed"}
    assert {path.read_text() for path in tmp_path.glob("seen*")} <= {"3", "GPU-5"}
    assert sorted(settings.free.get_nowait() for _ in range(2)) == ["3", "GPU-5"]


def test_nothing_starts_when_the_time_is_over(tree):
    tree.seconds = 0.0
    [case] = run_gpu.run_all(tree, [f"{FILE}::test_fine"])
    assert case.outcome == "not run"


def test_groups_hold_one_function_each():
    ids = [f"a.py::f[{n}]" for n in range(40)] + ["a.py::g", "b.py::C::f[x y]"]
    jobs = run_gpu.groups_of(ids, 4)
    assert sorted(case for job in jobs for case in job.ids) == sorted(ids)
    assert [job.ids for job in jobs[:2]] == [("a.py::g",), ("b.py::C::f[x y]",)]
    assert {len(job.ids) for job in jobs[2:]} == {4}
    assert len(run_gpu.groups_of(ids[:10], 4)) == 5


def test_report_names():
    assert run_gpu.xml_key("tests/a/test_b.py::C::f[x::y]") == ("tests.a.test_b.C", "f[x::y]")
    assert run_gpu.xml_key("tests/a/test_b.py::f") == ("tests.a.test_b", "f")


def test_summary_and_status(tree, tmp_path, monkeypatch, capsys):
    file = tmp_path / "gpu.json"
    cases = [Case("a.py::f", "passed", 1.0), Case("a.py::g", "failed", 2.0, "AssertionError: x")]
    monkeypatch.setattr(run_gpu, "collect", lambda settings: ([c.id for c in cases], {}))
    monkeypatch.setattr(run_gpu, "run_all", lambda settings, ids: cases)
    assert run_gpu.main(["--results", str(file), "--workers", "2"]) == 1
    kept = json.loads(file.read_text())
    assert kept["counts"] == {"passed": 1, "failed": 1} and kept["cases"][1]["message"]
    assert "failed  a.py::g  AssertionError: x" in capsys.readouterr().out
    cases.pop()
    assert run_gpu.main(["--results", str(file)]) == 0
