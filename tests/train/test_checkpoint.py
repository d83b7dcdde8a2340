import json
import warnings

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.parallel import checkpoint as parallel_checkpoint
from ridgeline.parallel import storage, tensor_file
from ridgeline.parallel.checkpoint import Record, Saver, newest_whole, publish, scan
from ridgeline.parallel.storage import DamagedError, whole_piece
from ridgeline.train import checkpoint
from ridgeline.train.checkpoint import load, run_lock


def snapshot(step: int):
    record = Record(
        step=step,
        consumed_samples=4 * step,
        config={"optim": {"lr": 0.001}, "run_dir": "x"},
        facts={"identity_hash": "abc"},
        tokenizer={"tokenizer.json": '{"é": 1}', "tokenizer_config.json": "{}"},
    )
    sections = {
        "model": {"a.weight": torch.randn(3, 2).bfloat16(), "b": torch.arange(3.0)},
        "optimizer": {"exp_avg.a.weight": torch.randn(2, 3).T, "step.b": torch.tensor(2.0)},
        "rng": checkpoint.rng_state(),
    }
    return record, sections


def save(folder, kept, *, keep_last):
    record, sections = kept
    state = {
        f"{section}/{name}": [whole_piece(tensor)]
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    }
    return publish(folder, record, state, keep_last=keep_last)


def latest(folder):
    found = newest_whole(folder)
    return found and found[0]


def test_round_trip(tmp_path):
    kept = snapshot(7)
    path = save(tmp_path, kept, keep_last=2)
    found = load(path)
    assert (found.step, found.consumed_samples) == (7, 28)
    record, sections = kept
    assert (found.config, found.facts) == (record.config, record.facts)
    assert found.tokenizer == record.tokenizer
    for part, ours in sections.items():
        theirs = getattr(found, part)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])


def test_only_safetensors_and_json(tmp_path):
    path = save(tmp_path, snapshot(1), keep_last=1)
    names = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    assert names == [
        "metadata.json",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]


def test_large_sections_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PART_BYTES", 8)
    kept = snapshot(1)
    path = save(tmp_path, kept, keep_last=1)
    names = {file.name for file in path.glob("*.safetensors")}
    assert names >= {"model.safetensors", "model.1.safetensors", "optimizer.1.safetensors"}
    found = load(path)
    for section in ("model", "optimizer", "rng"):
        ours = kept[1][section]
        theirs = getattr(found, section)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    flip(path)
    with pytest.raises(DamagedError, match="model.safetensors does not match its checksum"):
        load(path)


def test_random_numbers_go_on(tmp_path):
    path = save(tmp_path, snapshot(1), keep_last=1)
    wanted = torch.rand(4)
    checkpoint.set_rng_state(load(path).rng)
    assert torch.equal(torch.rand(4), wanted)


def test_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 10, 100_000_000):
        save(tmp_path, snapshot(step), keep_last=2)
    assert [p.name for p in scan(tmp_path)] == ["step-100000000", "step-00000010"]
    assert latest(tmp_path) == tmp_path / "step-100000000"
    assert latest(tmp_path / "none") is None


def cut(path):
    file = path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def flip(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose(path):
    (path / "tokenizer" / "tokenizer.json").unlink()


def edit(path):
    state = json.loads((path / "state.json").read_text())
    state["consumed_samples"] += 1
    (path / "state.json").write_text(json.dumps(state))


def cut_state(path):
    file = path / "state.json"
    file.write_text(file.read_text()[:-20])


def no_state(path):
    (path / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut, r"optimizer.safetensors has \d+ bytes, \d+ were written"),
        (flip, r"model.safetensors does not match its checksum"),
        (lose, r"tokenizer.json is missing"),
        (edit, r"state.json was changed after it was written"),
        (cut_state, r"state.json is not whole"),
        (no_state, r"could not read .*step-00000002: No such file or directory"),
    ],
)
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, damage, text):
    save(tmp_path, snapshot(1), keep_last=2)
    damaged = save(tmp_path, snapshot(2), keep_last=2)
    assert latest(tmp_path) == damaged
    damage(damaged)
    with pytest.raises(DamagedError, match=text):
        load(damaged)
    with pytest.warns(RuntimeWarning, match=text + "; trying the one before"):
        assert latest(tmp_path) == tmp_path / "step-00000001"


def test_a_damaged_later_one_does_not_push_out_a_good_one(tmp_path):
    flip(save(tmp_path, snapshot(9), keep_last=1))
    save(tmp_path, snapshot(5), keep_last=1)
    with pytest.warns(RuntimeWarning, match="does not match its checksum"):
        assert latest(tmp_path) == tmp_path / "step-00000005"


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_previous_one(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1), keep_last=1)
    monkeypatch.setattr(tensor_file, "_append", full_disk)
    with pytest.raises(UserError, match=r"could not write .*: .*No space left on device"):
        save(tmp_path, snapshot(2), keep_last=1)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert latest(tmp_path) == tmp_path / "step-00000001"


def test_what_a_killed_process_left_is_cleared(tmp_path):
    folder = tmp_path / "checkpoints"
    good = save(folder, snapshot(1), keep_last=1)
    # Killed between moving the old folder aside and renaming the new one into place.
    good.rename(folder / ".step-00000001.abcd.old")
    (folder / ".step-00000001.abcd.tmp").mkdir()
    (folder / ".step-00000002.efgh.tmp").mkdir()
    with run_lock(tmp_path):
        assert [p.name for p in folder.iterdir()] == ["step-00000001"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert latest(folder) == good


def test_one_process_a_run(tmp_path):
    with run_lock(tmp_path), pytest.raises(UserError, match="another process is training in"):
        with run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_a_run_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"could not use .*file"), run_lock(tmp_path / "file"):
        pass


def test_another_version_is_refused_and_not_passed_over(tmp_path):
    path = save(tmp_path, snapshot(2), keep_last=2)
    state = json.loads((path / "state.json").read_text()) | {"format": 1}
    del state["sha256"]
    state["sha256"] = parallel_checkpoint._state_digest(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="has format 1, this version reads 2; go on with") as caught:
        latest(tmp_path)
    assert not isinstance(caught.value, DamagedError)


def test_boxes_that_do_not_tile_are_damage(tmp_path):
    path = save(tmp_path, snapshot(2), keep_last=2)
    metadata = json.loads((path / "metadata.json").read_text())
    metadata["model/b"]["chunks"][0]["sizes"] = [2]
    (path / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(DamagedError, match="does not tile model/b"):
        storage.read_whole(path, "model")


def test_beside_the_training_the_state_at_the_call_is_written(tmp_path):
    weight = torch.zeros(1000)
    saver = Saver(tmp_path, keep_last=1)
    record = Record(step=1, consumed_samples=1, config={}, facts={})
    saver.save(record, {"model/w": [whole_piece(weight)]}, beside=True)
    weight += 1  # training goes on
    saver.wait()
    assert torch.equal(storage.read_whole(latest(tmp_path), "model")["w"], torch.zeros(1000))


def test_what_fails_beside_the_training_is_raised_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_append", full_disk)
    saver = Saver(tmp_path, keep_last=1)
    record = Record(step=1, consumed_samples=1, config={}, facts={})
    saver.save(record, {"model/w": [whole_piece(torch.zeros(3))]}, beside=True)
    with pytest.raises(UserError, match="No space left on device"):
        saver.wait()
    saver.wait()  # told once
    assert scan(tmp_path) == [] and list(tmp_path.iterdir()) == []
