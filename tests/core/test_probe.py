"""The probe times what it is given and reports rates of the right size."""

from __future__ import annotations

import time

import pytest

from ridgeline.core import arch, probe


def test_times_are_wall_times_of_single_calls():
    calls = []

    def work():
        calls.append(1)
        time.sleep(0.02 if len(calls) == 3 else 0.01)

    times = probe.times_s(work, "cpu", budget_s=0.0, at_least=4)
    assert len(times) == 4 and len(calls) == 5
    # The warm-up does not count, so the slow third call is the second of the times.
    assert times.index(max(times)) == 1 and max(times) >= 0.02
    assert min(times) >= 0.01
    assert probe.best_seconds(work, "cpu", 0.0) >= 0.01


def test_a_budget_buys_more_runs():
    few = probe.times_s(lambda: time.sleep(0.002), "cpu", budget_s=0.0)
    many = probe.times_s(lambda: time.sleep(0.002), "cpu", budget_s=0.1)
    assert len(few) == 3 and len(many) > 5


def test_rates_count_flops_and_bytes(monkeypatch):
    """With every call said to last one second, the figures are the sizes themselves."""
    monkeypatch.setattr(probe, "best_seconds", lambda *_: 1.0)
    found = probe.measure_ceilings("cpu", 0.01)
    machine = arch.detect("cpu")
    size = min(max(8 * machine.l2_bytes, 2**27), 2**32, machine.memory_bytes // 8)
    assert found.read_gbps == pytest.approx(size / 1e9)
    assert found.copy_gbps == pytest.approx(2 * size / 1e9)
    # One second is above the slowest run that is repeated at a larger size.
    assert found.matmul_tflops == {"float32": 2 * 256**3 / 1e12, "bfloat16": 2 * 256**3 / 1e12}
    assert found.measured


def test_dtypes_by_architecture():
    assert probe.matmul_dtypes(arch.pretend("cpu")) == ["float32", "bfloat16"]
    assert "float8_e4m3fn" not in probe.matmul_dtypes(arch.pretend("sm80"))
    assert "float8_e4m3fn" in probe.matmul_dtypes(arch.pretend("sm90"))


def test_a_budget_must_be_positive():
    with pytest.raises(ValueError, match="budget_s must be positive, got 0"):
        probe.measure_ceilings("cpu", 0)
