import json

import pytest

from ridgeline.train.config import LogConfig
from ridgeline.train.profile import StepProfiler, length, shares, split, union
from ridgeline.train.ranks import Ranks
from ridgeline.train.trainer import train
from tests.train.helpers import rows_of


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert length([(0, 2), (1, 3), (10, 11)]) == 4


def test_time_counts_once_and_compute_first():
    found = split(
        [
            ("aten::mm", False, 0, 10),
            ("aten::matmul", False, 0, 10),  # the parent of the one before
            ("gloo:all_reduce", False, 5, 14),  # 4 exposed
            ("gloo:recv", False, 12, 20),  # of these 2 are the pipeline's
            ("c10d::allreduce_", False, 5, 6),  # the launch
            ("ProfilerStep", False, 0, 100),
        ]
    )
    wanted = {"compute": 10e-6, "bubble": 8e-6, "exposed_comm": 2e-6}
    assert found == pytest.approx(wanted)


def test_on_a_gpu_the_host_does_not_count():
    found = split(
        [
            ("aten::mm", False, 0, 1000),
            ("ampere_sgemm", True, 0, 10),
            ("ncclDevKernel_AllGather_RING_LL", True, 8, 13),
            ("ncclDevKernel_SendRecv", True, 13, 14),
        ]
    )
    assert found == pytest.approx({"compute": 10e-6, "exposed_comm": 3e-6, "bubble": 1e-6})
    assert shares({"compute": 3.0, "exposed_comm": 1.0}) == "compute 75% exposed comm 25%"


def test_which_steps(tmp_path):
    alone = StepProfiler(LogConfig(profile_step=3), tmp_path, Ranks())
    assert [step for step in range(1, 200) if alone.due(step)] == [3]
    many = StepProfiler(LogConfig(breakdown_every_steps=50), tmp_path, Ranks(size=2))
    assert [step for step in range(1, 130) if many.due(step)] == [2, 52, 102]
    never = StepProfiler(LogConfig(breakdown_every_steps=0), tmp_path, Ranks(size=2))
    assert not any(never.due(step) for step in range(1, 200))


def test_a_trace_on_request(make_config):
    config = make_config(steps=3, log={"profile_step": 2}, optim={"warmup_steps": 0})
    train(config)
    trace = json.loads((config.run_dir / "profile" / "step-2-rank-00000.json").read_text())
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    profiled = rows_of(config)[1]
    assert profiled["step_ms"]["compute"] > 0 == profiled["step_ms"]["exposed_comm"]
    assert "tokens_per_s" not in profiled and "tokens_per_s" in rows_of(config)[2]
