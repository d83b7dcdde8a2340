"""Training under layouts through `train`: the losses of one process, and its checkpoints."""

from __future__ import annotations

import json

import pytest
import torch

from ridgeline.nn.config import DecoderConfig
from ridgeline.parallel.layout import Layout
from ridgeline.train.checkpoint import load
from ridgeline.train.trainer import train
from tests.train.helpers import curve, rows_of
from tests.train.ranks import done, reload_and_save, run_ranks, train_ranks

pytestmark = pytest.mark.dist

LAYOUTS = {
    "one": Layout(),
    "ddp2": Layout(dp_replicate=2, zero=0),
    "zero1": Layout(dp_shard=2, zero=1),
    "zero3": Layout(dp_shard=2),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "tp2": Layout(tp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True, dp_shard=2),
    "pp2": Layout(pp=2),
    "pp2i": Layout(pp=2, schedule="interleaved", dp_shard=2),
    "cp2": Layout(cp=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "dp4": Layout(dp_shard=4),
    "3d": Layout(dp_shard=2, tp=2, pp=2),
}


@pytest.fixture
def small_model(tmp_path):
    """Four layers, more query heads than key-value heads, a vocabulary that two do not divide."""
    shape = DecoderConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        max_seqlen=128,
        tie_embeddings=True,
    )
    folder = tmp_path / "small_model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.to_hf()), encoding="utf-8")
    return folder


@pytest.fixture
def config_of(make_config):
    def make(layout: str, run: str = "run", **changes):
        fields = {"batch_samples": 8, "micro_batch_samples": 1, "layout": LAYOUTS[layout]}
        return make_config(run, **fields | changes)

    return make


def reload(tmp_path, config, step):
    layout = config.layout
    done(run_ranks(tmp_path / "ranks", layout.world_size, reload_and_save, config, step))
    return config.run_dir / "checkpoints" / f"step-{step:08d}"


def assert_bitwise(ours, theirs):
    assert ours.consumed_samples == theirs.consumed_samples
    for part in ("model", "optimizer"):
        before, after = getattr(ours, part), getattr(theirs, part)
        assert before.keys() == after.keys() and len(before) > 0
        for name in before:
            assert before[name].dtype == after[name].dtype, name
            assert torch.equal(before[name], after[name]), name


# Each hop is one saved layout resumed under another, and bitwise the same state: 12 pairs.
CHAIN = (
    "one", "zero3", "tp2", "pp2", "tp2pp2", "zero1", "3d", "ddp2", "pp2i", "cp2", "hsdp", "tp2sp",
    "one",
)  # fmt: skip


def test_a_checkpoint_of_any_layout_goes_on_under_any_other(tmp_path, config_of):
    expected = config_of("one", "straight")
    train(expected)
    train(config_of("one"), stop_at_step=3)
    first = load(config_of("one").run_dir / "checkpoints" / "step-00000003")
    assert len(first.model) == 4 * 9 + 2 and len(first.optimizer) == 3 * len(first.model)
    for hop, name in enumerate(CHAIN[1:], start=1):
        path = reload(tmp_path, config_of(name), 3 + hop)
        assert_bitwise(load(path), first)
        state = json.loads((path / "state.json").read_text())
        assert state["consumed_samples"] == 24


@pytest.mark.parametrize("name", ["hsdp", "tp2pp2"])
def test_a_run_under_a_layout_equals_one_process(tmp_path, config_of, name):
    straight, config = config_of("one", "straight"), config_of(name)
    export = {"export": True, "every_steps": 2}
    train(config_of("one", "straight", checkpoint=export))
    config = config_of(name, checkpoint=export)
    results = done(run_ranks(tmp_path / "ranks", 4, train_ranks, config))
    wanted = curve(straight)
    for ours, theirs in zip(curve(config), wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(result.losses == results[0].losses for result in results)
    assert results[0].eval_loss == pytest.approx(rows_of(straight, "eval")[-1]["loss"], rel=1e-5)
    rows = rows_of(config)
    assert set(rows[1]["step_ms"]) == {"compute", "exposed_comm", "bubble", "data", "other"}
    assert sum(rows[1]["step_ms"].values()) > 0 and rows[1]["step_ms"]["exposed_comm"] > 0
    assert (rows[1]["step_ms"]["bubble"] > 0) == (config.layout.pp > 1)
    assert rows[-1]["tokens_per_s_per_gpu"] == pytest.approx(rows[-1]["tokens_per_s"] / 4)
    ours, theirs = (load_exported(each.run_dir / "model") for each in (config, straight))
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-5)


def load_exported(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_order_of_samples_does_not_know_the_number_of_ranks(tmp_path, config_of):
    """Two steps on one process, two on two data ranks, two on four: the run of one process."""
    straight = config_of("one", "straight")
    train(straight)
    train(config_of("one"), stop_at_step=2)
    done(run_ranks(tmp_path / "ranks", 2, train_ranks, config_of("zero3"), 4))
    done(run_ranks(tmp_path / "ranks", 4, train_ranks, config_of("dp4")))
    assert [row["step"] for row in rows_of(straight)] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(curve(config_of("one")), curve(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_weights_in_bf16_from_a_folder_and_over_to_one_process(tmp_path, config_of):
    """Ranks read a Hugging Face folder, each its boxes; their masters go over to one process."""
    first = train(config_of("one", "first", steps=2, checkpoint={"export": True}))
    further = {
        "dtype": "bfloat16",
        "model": {"folder": first.exported, "init": "weights"},
        "data": {"tokenizer": "auto"},
        "optim": {"lr": 0.0, "warmup_steps": 0},
    }
    config = config_of("tp2sp", "further", **further)
    results = done(run_ranks(tmp_path / "ranks", 4, train_ranks, config, 1))
    found = load(results[0].checkpoint)
    weights = load_exported(first.exported)
    assert found.model.keys() == weights.keys()
    assert all(torch.equal(found.model[name], weights[name]) for name in weights)
    alone = reload(tmp_path, config_of("one", "further", **further), 2)
    assert_bitwise(load(alone), found)


def test_a_folder_that_is_not_whole_is_refused_on_every_rank(tmp_path, config_of):
    from safetensors.torch import save_file

    first = train(config_of("one", "first", steps=2, checkpoint={"export": True}))
    weights = load_exported(first.exported)
    extra = weights | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    save_file(extra, first.exported / "model.safetensors")
    config = config_of(
        "zero3",
        "further",
        model={"folder": first.exported, "init": "weights"},
        data={"tokenizer": "auto"},
    )
    outcomes = run_ranks(tmp_path / "ranks", 2, train_ranks, config)
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert all("must hold only tensors of the model" in outcome.said for outcome in outcomes)
