"""`doctor` measures, keeps and tells."""

from __future__ import annotations

import json

import torch

from ridgeline.cli import main as cli
from ridgeline.cli.doctor import DoctorConfig, doctor, implementations
from ridgeline.cli.problems import QUERIES, typical
from ridgeline.core import registry
from ridgeline.core.arch import Ceilings, detect, load_ceilings, pretend, save_ceilings


def test_it_measures_and_keeps_the_ceilings(capsys):
    assert load_ceilings(detect("cpu")) is None
    assert cli.main(["doctor", "--device", "cpu", "--budget-s", "0.01", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = load_ceilings(detect("cpu"))
    assert kept is not None and kept.measured
    ceilings = said["devices"][0]["ceilings"]
    assert ceilings == {
        "read_gbps": kept.read_gbps,
        "copy_gbps": kept.copy_gbps,
        "matmul_tflops": kept.matmul_tflops,
        "source": kept.source,
        "measured": True,
    }
    # Any machine since 2000 reads above 0.1 GB/s, and no CPU above 10 TB/s.
    assert 0.1 < kept.read_gbps < 1e4 and 0.1 < kept.copy_gbps < 1e4
    assert 1e-4 < kept.matmul_tflops["float32"] < 1e3
    assert torch.__version__ in kept.source


def test_without_measuring_it_shows_what_is_kept(capsys):
    kept = Ceilings(
        read_gbps=12.5, copy_gbps=11.5, matmul_tflops={"float32": 0.25}, source="a test",
        measured=True,
    )  # fmt: skip
    save_ceilings(detect("cpu"), kept)
    assert cli.main(["doctor", "--device", "cpu", "--no-measure"]) == 0
    said = capsys.readouterr().out
    assert "12.5 GB/s" in said and "0.25 TFLOP/s" in said and "20 FLOP/byte" in said
    assert "ceilings a test" in said


def test_implementations_are_the_registrys():
    for arch in (detect("cpu"), pretend("sm90")):
        rows = implementations(arch)
        assert {(row["op"], row["impl"]) for row in rows} == {
            (op, impl.name) for op in QUERIES for impl in registry.impls(op)
        }
        for row in rows:
            impl = next(i for i in registry.impls(row["op"]) if i.name == row["impl"])
            accepted = [
                dtype
                for dtype in impl.dtypes
                if registry.refusal(impl, typical(row["op"], dtype), arch) is None
            ]
            assert row["dtypes"] == accepted and row["available"] == bool(accepted)
            assert (row["refusal"] is None) == bool(accepted)


def test_it_says_why_an_implementation_is_not_there(capsys):
    assert cli.main(["doctor", "--device", "cpu", "--no-measure"]) == 0
    said = capsys.readouterr().out
    assert "no: written for sm80, not cpu" in said and "no: written for sm90, not cpu" in said


def test_bad_input(capsys, monkeypatch):
    assert cli.main(["doctor", "--device", "cpu", "--budget-s", "0"]) == 2
    assert "--budget-s must be positive, got 0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "ridgeline: doctor: no CUDA device is usable here; use --device cpu\n"
    )


def test_facts_are_this_machines():
    facts = doctor(DoctorConfig(device="cpu", measure=False))
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["machine"]["cores"] == detect("cpu").num_units
