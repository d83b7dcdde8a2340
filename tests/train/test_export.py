"""A Hugging Face folder out of a run: what may be replaced, and checkpoints converted."""

from __future__ import annotations

import pytest
import torch

from ridgeline.cli.convert import ConvertConfig, convert
from ridgeline.core.errors import UserError
from ridgeline.nn.hf import load_pretrained
from ridgeline.train.checkpoint import load
from ridgeline.train.config import is_checkpoint
from ridgeline.train.trainer import train


def test_a_checkpoint_and_its_run_become_the_exported_folder(tmp_path, make_config):
    config = make_config(checkpoint={"export": True})
    result = train(config)
    wanted = load_pretrained(result.exported)
    for source in (config.run_dir, result.checkpoint):
        out = tmp_path / source.name / "hf"
        said = convert(ConvertConfig(source=source, out=out))
        assert said["dtype"] == "float32" and said["source"] == str(result.checkpoint)
        found = load_pretrained(out)
        assert found.config == wanted.config
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        text = (out / "tokenizer.json").read_text()
        assert text == (result.exported / "tokenizer.json").read_text()


def test_the_dtype_is_the_runs_or_the_one_asked_for(tmp_path, make_config):
    result = train(make_config(dtype="bfloat16", steps=2, checkpoint={"export": True}))
    masters = load(result.checkpoint).model
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())
    for name, dtype in (("keep", torch.bfloat16), ("float16", torch.float16)):
        convert(ConvertConfig(source=result.checkpoint, out=tmp_path / name, dtype=name))
        found = load_pretrained(tmp_path / name)
        for key, tensor in found.named_parameters():
            assert torch.equal(tensor, masters[key].to(dtype)), key
    exported = load_pretrained(result.exported)
    assert all(torch.equal(p, masters[n].bfloat16()) for n, p in exported.named_parameters())


def test_a_damaged_checkpoint_is_not_converted(tmp_path, make_config):
    config = make_config()
    result = train(config)
    file = result.checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="model.safetensors has .* bytes"):
        convert(ConvertConfig(source=result.checkpoint, out=tmp_path / "out"))
    with pytest.warns(RuntimeWarning, match="trying the one before"):
        said = convert(ConvertConfig(source=config.run_dir, out=tmp_path / "out"))
    assert said["source"].endswith("step-00000004")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="has no good checkpoint"):
        convert(ConvertConfig(source=tmp_path / "empty", out=tmp_path / "out2"))
    assert not is_checkpoint(tmp_path)


def test_what_ridgeline_did_not_write_is_not_replaced_by_the_model(make_config):
    """`--run-dir .` exports to ./model, which may be the user's own."""
    config = make_config(checkpoint={"export": True})
    own = config.run_dir / "model"
    own.mkdir(parents=True)
    (own / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"which holds thesis.tex; choose another run_dir, move"):
        train(config)
    assert (own / "thesis.tex").read_text() == "years of work"
    assert not (config.run_dir / "checkpoints").exists()
    train(make_config(checkpoint={"export": False}, steps=1, optim={"warmup_steps": 0}))


def test_the_folder_that_is_trained_further_is_not_replaced(make_config):
    first = train(make_config(checkpoint={"export": True}, steps=2))
    model = {"folder": first.exported, "init": "weights"}
    with pytest.raises(UserError, match="model.folder must not be .*model, where the trained"):
        train(make_config(checkpoint={"export": True}, model=model, data={"tokenizer": "auto"}))
