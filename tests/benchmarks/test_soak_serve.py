"""The soak of the server, twenty seconds of it, and that its verdict can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "engine" / "soak_serve.py"


@pytest.fixture(scope="module")
def soak():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("soak_serve", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_serve"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak_serve"]


@pytest.mark.timeout(240)
def test_twenty_seconds_at_twice_the_capacity(soak):
    result = soak.run(20.0)
    assert result["failures"] == [], result
    assert result["generated_tokens"] > 0
    assert {key.split()[0] for key in result["answers"]} == set(soak.KINDS)


IDLE = dict.fromkeys(
    ("requests_running", "requests_waiting", "queued_tokens", "kv_pages_used"), 0.0
) | {"generation_tokens_total": 1.0, "slow_readers_total": 0.0, "clients_gone_total": 0.0}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"numbers": {**IDLE, "kv_pages_used": 3.0}}, "kv_pages_used is 3 when nothing runs"),
        ({"exit_code": 1}, "ended with exit code 1"),
        ({"memory": [(float(i), 100.0 + 10 * i) for i in range(30)]}, "memory grew"),
        ({"answers": {"stream 200": 4}}, "nothing was shed"),
        ({"wrong": ["stream: 500 x"]}, "stream: 500 x"),
        ({}, ""),
    ],
)
def test_a_verdict(soak, change, part):
    tally = soak.Tally()
    tally.answers.update(change.get("answers", {"stream 429": 1, "stream 200": 3}))
    tally.memory_mib = change.get("memory", [(float(i), 100.0) for i in range(30)])
    tally.wrong = change.get("wrong", [])
    found = soak.verdict(tally, change.get("numbers", IDLE), change.get("exit_code", 0))
    assert [part in each for each in found["failures"]] == ([True] if part else [])
