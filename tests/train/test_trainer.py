import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core import progress
from ridgeline.core.errors import UserError
from ridgeline.nn.hf import load_pretrained
from ridgeline.parallel.checkpoint import scan
from ridgeline.parallel.loss import IGNORE
from ridgeline.train import checkpoint, trainer, worker
from ridgeline.train.data import PackedSamples
from ridgeline.train.ranks import Ranks
from ridgeline.train.start import model_config, prepare
from ridgeline.train.tokens import byte_tokenizer
from ridgeline.train.toml import load_config
from ridgeline.train.trainer import train
from tests.train.helpers import assert_same, curve, rows_of, store_of, tensors_of


@pytest.fixture
def uninterrupted(make_config):
    """Curve and final tensors of a run of six steps; runs once a dtype."""
    kept = {}

    def run(**changes):
        key = str(changes)
        if key not in kept:
            config = make_config("straight", **changes)
            result = train(config)
            assert result.interrupted is None and result.step == 6
            kept[key] = curve(config), tensors_of(result.checkpoint)
        return kept[key]

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bitwise(make_config, uninterrupted, dtype):
    expected = uninterrupted(dtype=dtype)
    config = make_config(dtype=dtype)
    first = train(config, stop_at_step=3)
    assert (first.interrupted, first.step, first.resumed_from) == ("stop_at_step", 3, None)
    torch.manual_seed(99)  # a new process starts elsewhere
    second = train(config)
    assert (second.interrupted, second.step, second.resumed_from) == (None, 6, 3)
    assert_same(config, expected)


def test_a_damaged_checkpoint_costs_only_its_steps(make_config, uninterrupted):
    expected, config = uninterrupted(), make_config()
    newest = train(config, stop_at_step=4).checkpoint
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="trying the one before"):
        assert train(config).resumed_from == 2
    assert_same(config, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_signal_before_the_first_step_is_done(make_config, uninterrupted, monkeypatch, dtype):
    expected, config = uninterrupted(dtype=dtype), make_config(dtype=dtype)
    batch = PackedSamples.batch

    def interrupting(self, indices):
        os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, indices)

    monkeypatch.setattr(PackedSamples, "batch", interrupting)
    assert train(config).step == 0
    monkeypatch.undo()
    assert train(config).resumed_from == 0
    assert_same(config, expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(make_config, uninterrupted, number, capsys):
    expected, config = uninterrupted(), make_config(checkpoint={"every_steps": 0})
    before = signal.getsignal(number)

    def interrupt(row):
        if row["step"] == 3:
            os.kill(os.getpid(), number)

    progress.set_mode("lines")
    try:
        result = train(config, on_step=interrupt)
    finally:
        progress.set_mode("quiet")
    assert (result.interrupted, result.step) == (number.name, 3)
    assert result.checkpoint.name == "step-00000003" and signal.getsignal(number) is before
    assert f"stopped by {number.name} at step 3 of 6" in capsys.readouterr().out
    assert train(config).resumed_from == 3
    assert_same(config, expected)


def test_a_signal_in_mid_step_abandons_it(make_config, uninterrupted, monkeypatch):
    expected, config = uninterrupted(), make_config()
    batch, calls = PackedSamples.batch, []

    def interrupting(self, indices):
        calls.append(len(indices))
        if len(calls) == 3:  # the first of the second step's two micro-batches
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, indices)

    monkeypatch.setattr(PackedSamples, "batch", interrupting)
    result = train(config)
    monkeypatch.undo()
    assert (result.interrupted, result.step, len(calls)) == ("SIGTERM", 1, 3)
    train(config)
    assert_same(config, expected)


def test_a_second_signal_stops_at_once(make_config):
    config = make_config()

    def interrupt(row):
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, on_step=interrupt)
    assert [p.name for p in scan(config.run_dir / "checkpoints")] == ["step-00000002"]


def test_accumulation_equals_the_big_batch(make_config):
    runs = {}
    for size in (1, 2, 4):
        config = make_config(f"micro{size}", micro_batch_samples=size, steps=3)
        train(config)
        runs[size] = curve(config)
    for size in (1, 2):
        for ours, whole in zip(runs[size], runs[4], strict=True):
            assert ours == pytest.approx(whole, rel=2e-5)


def test_the_loss_of_a_step_is_the_mean_over_its_valid_tokens(make_config):
    """Against the plain form: one document at a time, full logits, no packing."""
    config = make_config(steps=2, batch_samples=6, micro_batch_samples=3)
    start = prepare(config, torch.device("cpu"), Ranks())
    model = start.worker.model
    batch = start.data.train.batch(start.data.order(0, 6))
    total = torch.zeros(())
    for document, targets in zip(
        batch.token_ids_P.split(batch.seqlens), batch.targets_P.split(batch.seqlens), strict=True
    ):
        logits = model(document[None])[0]
        total = total + F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    mean = total / batch.num_valid
    mean.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    train(config)
    first = rows_of(config)[0]
    assert first["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["valid_tokens"] == batch.num_valid


def test_documents_do_not_see_each_other(make_config):
    config = make_config()
    shape = model_config(config, byte_tokenizer())
    model = worker.OneProcess(config, shape, torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (9, 20, 30, 5)]

    def losses(documents):
        batch = PackedSamples(store_of(documents), torch.arange(4).numpy(), 64).batch([0])
        hidden = model.hidden(
            batch.token_ids_P[None],
            positions=batch.position_ids_P[None],
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
        logits = model.head(hidden)[0]
        each = F.cross_entropy(logits, batch.targets_P, ignore_index=IGNORE, reduction="none")
        return each.split([9, 20, 30, 5])

    changed = [*documents[:1], [(token + 1) % 256 for token in documents[1]], *documents[2:]]
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(losses(documents), losses(changed), strict=True)):
            assert torch.equal(a, b) == (i != 1)


def test_the_loss_falls_on_real_text(make_config):
    config = make_config(
        steps=40,
        batch_samples=4,
        micro_batch_samples=4,
        optim={"lr": 2e-2},
        checkpoint={"every_steps": 0},
        log={"eval_every_steps": 20, "eval_samples": 4},
    )
    result = train(config)
    assert math.log(257) - 0.1 < result.losses[0] < math.log(257) + 0.3
    assert result.losses[-1] < 3.3
    evaluations = rows_of(config, "eval")
    assert [row["step"] for row in evaluations] == [20, 40]
    assert result.eval_loss == evaluations[-1]["loss"] < evaluations[0]["loss"] < 4.0
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(result.eval_loss))
    assert result.tokens_per_s > 0 and 0 < result.mfu_causal < result.mfu_noncausal < 1.5


def test_a_run_leaves_its_config_and_a_model(make_config, small_model):
    config = make_config(checkpoint={"export": True}, steps=3, optim={"warmup_steps": 0})
    result = train(config)
    assert load_config(config.run_dir / "config.toml") == config
    exported = load_pretrained(result.exported)
    trained = checkpoint.load(result.checkpoint).model
    assert all(torch.equal(p, trained[name]) for name, p in exported.named_parameters())
    assert exported.config.eos_token_ids == (256,)
    text = (result.exported / "tokenizer.json").read_text()
    assert text == byte_tokenizer().json_text
    again = train(config)  # nothing is left to do
    assert (again.step, again.resumed_from, again.losses) == (3, 3, ())
    further = make_config(
        "further",
        steps=1,
        optim={"warmup_steps": 0, "lr": 0.0},
        model={"folder": result.exported, "init": "weights"},
        data={"tokenizer": "auto"},
    )
    moved = checkpoint.load(train(further).checkpoint).model
    assert all(torch.equal(moved[name], trained[name]) for name in trained)


def test_changes_are_refused_by_name_or_accepted(make_config):
    train(make_config(), stop_at_step=2)
    changed = {"optim": {"lr": 1e-4}, "steps": 8}
    with pytest.raises(UserError, match=r"\(optim.lr: 0.005 -> 0.0001; steps: 6 -> 8\)") as caught:
        train(make_config(**changed))
    assert "checkpoint.accept_changes" in str(caught.value)
    result = train(make_config(checkpoint={"accept_changes": True}, **changed))
    assert (result.resumed_from, result.step) == (2, 8)


def test_batch_cut_and_place_may_change(make_config, tmp_path):
    config = make_config(micro_batch_samples=1)
    train(config, stop_at_step=2)
    moved = tmp_path / "moved.txt"
    moved.write_bytes(config.data.files[0].read_bytes())
    train(make_config(micro_batch_samples=4, data={"files": (moved,)}))
    straight = make_config("straight")
    train(straight)
    for ours, theirs in zip(curve(config), curve(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


def test_other_text_is_refused(make_config, tmp_path):
    train(make_config(), stop_at_step=2)
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"some other text, part {i}" for i in range(300)))
    with pytest.raises(UserError, match="the text of data.files is not what"):
        train(make_config(data={"files": (other,)}))


def test_resume_settings(make_config):
    with pytest.raises(UserError, match="has no good checkpoint and resume is always"):
        train(make_config(checkpoint={"resume": "always"}))
    train(make_config(), stop_at_step=1)
    with pytest.raises(UserError, match="has checkpoints and checkpoint.resume is never"):
        train(make_config(checkpoint={"resume": "never"}))


def test_divergence_is_loud_and_not_saved(make_config, monkeypatch):
    clip = worker.clip_gradients
    calls = []

    def poison(optimizers, max_norm):
        calls.append(1)
        norm = clip(optimizers, max_norm)
        return norm * math.nan if len(calls) == 4 else norm

    monkeypatch.setattr(worker, "clip_gradients", poison)
    config = make_config(log={"every_steps": 6})
    with pytest.raises(UserError, match=r"not finite by step 4; the last good state is step 2"):
        train(config)
    assert [p.name for p in scan(config.run_dir / "checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"data": {"files": ()}}, ValueError, "data.files must name at least one text file"),
        ({"data": {"seqlen": 129}}, ValueError, r"data.seqlen must be at most the .* \(128\)"),
        ({"model": {"init": "weights"}}, UserError, "safetensors"),
        ({"data": {"tokenizer": "nowhere"}}, UserError, "could not read nowhere"),
    ],
)
def test_bad_configs_end_in_one_line(make_config, changes, error, text):
    config = make_config(**changes)
    with pytest.raises(error, match=text) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert not (config.run_dir / "checkpoints").exists()


def test_a_gpu_that_is_not_there(make_config):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="no CUDA device is usable here; use --device cpu"):
        train(make_config(device="cuda"))


def test_the_vocabulary_must_hold_the_tokens(make_config, small_model):
    raw = json.loads((small_model / "config.json").read_text()) | {"vocab_size": 100}
    (small_model / "config.json").write_text(json.dumps(raw))
    config = make_config(steps=1, optim={"warmup_steps": 0})
    assert model_config(config, byte_tokenizer()).vocab_size == 257


def test_queued_work_is_waited_for_before_the_meter_stops(make_config, monkeypatch):
    events: list[object] = []
    stop = trainer.Meter.stop
    monkeypatch.setattr(trainer._Run, "_wait", lambda run: events.append(run.step))
    monkeypatch.setattr(
        trainer.Meter, "stop", lambda meter, lens: (events.append("stop"), stop(meter, lens))[1]
    )
    config = make_config(
        steps=6,
        checkpoint={"every_steps": 3},
        log={"every_steps": 6, "eval_every_steps": 2, "eval_samples": 2},
    )
    trainer.train(config)
    assert events == [
        "stop",
        1,
        "stop",
        2,
        "stop",
        3,
        "stop",
        "stop",
        5,
        "stop",
    ]  # steps done before
