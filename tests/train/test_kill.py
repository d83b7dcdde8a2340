"""kill -9 in mid-step and in mid-save, of one process and of one rank; the next start goes on
exactly. And what the ranks of a run say when they fail together, or stand still."""

from __future__ import annotations

import json
import signal

import pytest

from ridgeline.parallel.checkpoint import newest_whole
from ridgeline.parallel.layout import Layout
from ridgeline.train.trainer import train
from tests.train.helpers import assert_same, curve, tensors_of
from tests.train.ranks import (
    command_line,
    done,
    run_ranks,
    train_and_die,
    train_and_hang,
    train_on_a_full_disk,
    train_on_small_nodes,
    train_ranks,
    train_sharded_first,
    train_with_a_typo,
)


def newest(config):
    found = newest_whole(config.run_dir / "checkpoints")
    return found and found[0].name


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_process_killed_in_mid_save(tmp_path, make_config, asynchronous):
    checkpoint = {"every_steps": 2, "asynchronous": asynchronous}
    straight, config = make_config("straight"), make_config(checkpoint=checkpoint)
    result = train(straight)
    expected = curve(straight), tensors_of(result.checkpoint)
    (outcome,) = run_ranks(tmp_path / "ranks", 1, train_and_die, config, 0, "save")
    assert outcome.code == -signal.SIGKILL
    folder = config.run_dir / "checkpoints"
    assert newest(config) == "step-00000002"
    assert list(folder.glob(".step-00000004.*.tmp"))  # what it left half-written
    assert train(config).resumed_from == 2
    assert not list(folder.glob(".step-*"))
    assert_same(config, expected)


@pytest.fixture
def two(make_config):
    """A run of two data ranks, with or without pipeline."""

    def make(run: str = "run", **changes):
        fields = {"micro_batch_samples": 1, "layout": Layout(dp_shard=2), "timeout_s": 45.0}
        return make_config(run, **fields | changes)

    return make


@pytest.mark.dist
@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize(("when", "last"), [("step", 4), ("save", 2)])
def test_one_rank_killed(tmp_path, two, when, last, dying):
    """The other ends by itself, soon and with an error; the resumed run is the undisturbed one."""
    straight, config = two("straight"), two()
    result = done(run_ranks(tmp_path / "ranks", 2, train_ranks, straight))[0]
    expected = curve(straight), tensors_of(result.checkpoint)
    killed = run_ranks(tmp_path / "ranks", 2, train_and_die, config, dying, when, timeout_s=100)
    assert killed[dying].code == -signal.SIGKILL
    assert killed[1 - dying].code == 1, killed[1 - dying].said
    assert newest(config) in {f"step-{step:08d}" for step in (2, last)}
    resumed = done(run_ranks(tmp_path / "ranks", 2, train_ranks, config))
    assert resumed[0].resumed_from in (2, last)
    assert not list((config.run_dir / "checkpoints").glob(".step-*"))
    assert_same(config, expected)


@pytest.mark.dist
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks_with_one_warning(tmp_path, two):
    config = two()
    done(run_ranks(tmp_path / "ranks", 2, train_ranks, config, 4))
    file = config.run_dir / "checkpoints" / "step-00000004" / "optimizer-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    outcomes = run_ranks(tmp_path / "ranks", 2, train_ranks, config)
    assert [result.resumed_from for result in done(outcomes)] == [2, 2]
    text = "optimizer-00001.safetensors does not match its checksum; trying the one before"
    assert [outcome.said.count(text) for outcome in outcomes] == [1, 0]


@pytest.mark.dist
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_full_for_one_rank_ends_all_with_one_reason(tmp_path, two, asynchronous):
    config = two(checkpoint={"every_steps": 2, "asynchronous": asynchronous}, steps=40)
    outcomes = run_ranks(tmp_path / "ranks", 2, train_on_a_full_disk, config, 1)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    for outcome in outcomes:
        last = outcome.said.strip().splitlines()[-1]
        assert "UserError: checkpoint: could not write" in last and "No space left" in last
    assert newest(config) == "step-00000002"
    assert [p.name for p in (config.run_dir / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.dist
def test_a_hang_is_reported_and_ended(tmp_path, two):
    config = two(timeout_s=10.0)
    outcomes = run_ranks(tmp_path / "ranks", 2, train_and_hang, config, 1)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    said = outcomes[0].said
    assert "train: no progress for 10 s; behind: rank 1\n" in said
    lines = {line.split()[1]: line for line in said.splitlines() if line.startswith("  rank")}
    assert "training of step 3" in lines["0"] and "waits in gloo:" in lines["0"]
    assert "training of step 3" in lines["1"] and "last finished gloo:" in lines["1"]
    report = json.loads((config.run_dir / "hang" / "rank-00001.json").read_text())
    assert report["step"] == 3 and any("sleep" in line for line in report["stack"])
    assert "no progress" not in outcomes[1].said


# ---- said once, by the first rank ----------------------------------------------------------------


def words(config, *more: str) -> list[str]:
    data, text = config.data, str(config.data.files[0])
    return [
        "train", "--run-dir", str(config.run_dir), "--model.folder", str(config.model.folder),
        "--data.files", text, "--data.tokenizer", "byte", "--data.seqlen", "64", "--data.cache",
        str(data.cache), "--steps", "2", "--batch-samples", "4", "--micro-batch-samples", "1",
        "--device", "cpu", *more,
    ]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        ([], 2, "layout: sizes must multiply to the number of ranks (2), got pp 1 x"),
        (["--layout.tp", "2", "--layout.pp", "2"], 2, "to the number of ranks (2), got pp 2 x"),
        (["--layout.pp", "2", "--layout.num-microbatches", "1"], 2, "must be at least the 2 stage"),
        (
            ["--layout.dp-shard", "2", "--layout.zero", "0"],
            2,
            "layout.dp-shard must be 1 with zero",
        ),
        (["--layout.dp-shard", "2", "--data.tokenizer", "nowhere"], 1, "could not read nowhere"),
        (["--layout.tpp", "2"], 2, "--layout.tpp"),
    ],
)
def test_a_layout_that_cannot_be(tmp_path, two, more, code, text):
    outcomes = run_ranks(tmp_path / "ranks", 2, command_line, words(two(), *more))
    assert [outcome.code for outcome in outcomes] == [code, code], outcomes
    assert outcomes[0].said.count("ridgeline: ") == 1 and text in outcomes[0].said
    assert outcomes[1].said == ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("wrong", "layout", "text"),
    [
        (
            train_with_a_typo,
            "tp",
            "'model.layers.*.mlp.gate_prj' must match a module, got no match",
        ),
        (
            train_sharded_first,
            "dp-shard",
            "recomputation and compilation must come before sharding",
        ),
    ],
)
def test_a_model_that_is_put_together_wrongly(tmp_path, two, wrong, layout, text):
    outcomes = run_ranks(tmp_path / "ranks", 2, wrong, words(two(), f"--layout.{layout}", "2"))
    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    assert outcomes[0].said.count("ridgeline: ") == 1 and text in outcomes[0].said
    assert outcomes[1].said == ""


@pytest.mark.dist
def test_heads_that_do_not_divide(tmp_path, two, small_model):
    shape = json.loads((small_model / "config.json").read_text())
    shape |= {"num_attention_heads": 3, "num_key_value_heads": 3}
    (small_model / "config.json").write_text(json.dumps(shape))
    outcomes = run_ranks(tmp_path / "ranks", 2, command_line, words(two(), "--layout.tp", "2"))
    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    text = "ridgeline: layout: --layout.tp must divide the 3 query heads, got 2; use a divisor of 3"
    assert [outcome.said.count(text) for outcome in outcomes] == [1, 0]


@pytest.mark.dist
def test_tensor_parallel_across_nodes_is_said_once(tmp_path, two):
    line = words(two(), "--layout.tp", "2", "--checkpoint.no-export")
    outcomes = run_ranks(tmp_path / "ranks", 2, train_on_small_nodes, line)
    done(outcomes)
    text = "tp 2 does not divide the 1 ranks of a node, so tp groups cross nodes"
    assert [outcome.said.count(text) for outcome in outcomes] == [1, 0]


@pytest.mark.dist
def test_ranks_with_other_configs(tmp_path, two):
    line = words(two(), "--layout.dp-shard", "2")
    outcomes = run_ranks(tmp_path / "ranks", 2, command_line, line, {1: ["--optim.lr", "0.5"]})
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "layout: the config must be the same on every rank" in outcomes[0].said
    assert outcomes[1].said == ""
    assert not two().run_dir.exists()


@pytest.mark.dist
def test_the_command_prints_the_resolved_config_once(tmp_path, two):
    line = words(two(), "--layout.dp-shard", "2", "--no-log.tensorboard", "--checkpoint.no-export")
    line.remove("--no-log.tensorboard")
    outcomes = run_ranks(tmp_path / "ranks", 2, command_line, line)
    done(outcomes)
    assert "dp_shard = 2" in outcomes[0].said and "2 processes" in outcomes[0].said
    assert outcomes[1].said == ""
