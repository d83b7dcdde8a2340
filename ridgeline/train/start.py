"""How a run starts: checkpoint to go on from, tokenizer, data, model and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.core import progress
from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import UserError, bad_value
from ridgeline.core.files import atomic_dir, atomic_write_text
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_config, load_pretrained
from ridgeline.train import checkpoint
from ridgeline.train.config import TrainConfig, differences, identity, identity_hash
from ridgeline.train.data import TrainingData, load_data
from ridgeline.train.optim import PartOptimizer
from ridgeline.train.presets import preset
from ridgeline.train.tokens import TextTokenizer, choose_tokenizer, parse_tokenizer
from ridgeline.train.toml import to_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a training loop works on."""

    config: TrainConfig
    device: torch.device
    tokenizer: TextTokenizer
    data: TrainingData
    model: Decoder
    optimizer: PartOptimizer
    step: int
    """Steps done before this process."""
    consumed_samples: int
    resumed_from: int | None
    """Step of the checkpoint that is gone on from."""


def choose_device(name: str) -> torch.device:
    """The device that a config asks for. Raises: ValueError for cuda where there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise bad_value("train", "device", "be cpu where PyTorch sees no GPU", name, "use cpu")
    return torch.device(name)


def prepare(config: TrainConfig, device: torch.device) -> Start:
    """Read or make everything that the loop needs; the run folder's lock is held by the caller.

    Raises: ValueError and UserError as `train`.
    """
    snapshot = _snapshot(config)
    if snapshot is None:
        tokenizer = choose_tokenizer(config.data, config.model.folder)
    else:
        extra = {k: v for k, v in snapshot.tokenizer.items() if k != "tokenizer.json"}
        text = snapshot.tokenizer["tokenizer.json"]
        tokenizer = parse_tokenizer(text, "the checkpoint's tokenizer", extra)
    data = load_data(config.data, tokenizer, config.seed)
    if snapshot is not None:
        _check_data(config, snapshot, data)
    model = build_model(config, tokenizer, device)
    optimizer = PartOptimizer(model.named_parameters(), config.optim)
    if snapshot is not None:
        _restore(model, optimizer, snapshot)
    atomic_write_text(config.run_dir / "config.toml", to_toml(config))
    _write_tokenizer(config.run_dir / "tokenizer", tokenizer)
    return Start(
        config=config,
        device=device,
        tokenizer=tokenizer,
        data=data,
        model=model,
        optimizer=optimizer,
        step=snapshot.step if snapshot else 0,
        consumed_samples=snapshot.consumed_samples if snapshot else 0,
        resumed_from=snapshot.step if snapshot else None,
    )


def _snapshot(config: TrainConfig) -> checkpoint.Snapshot | None:
    """The checkpoint to go on from, checked against the config."""
    folder, resume = config.run_dir / "checkpoints", config.checkpoint.resume
    if resume == "never":
        if checkpoint.scan(folder):
            raise UserError(
                f"train: {folder} has checkpoints and checkpoint.resume is never; choose another "
                "run_dir, or resume"
            )
        return None
    snapshot = checkpoint.load_latest(folder)
    if snapshot is None:
        if resume == "always":
            raise UserError(f"train: {folder} has no good checkpoint and resume is always")
        return None
    if snapshot.facts["identity_hash"] != identity_hash(config):
        changed = differences(snapshot.facts["identity"], identity(config))
        if not config.checkpoint.accept_changes:
            raise UserError(
                f"train: the config differs from the checkpoint's in {config.run_dir} "
                f"({'; '.join(changed)}); restore it, choose another run_dir, or set "
                "checkpoint.accept_changes"
            )
        progress.say(f"resuming with changes: {'; '.join(changed)}")
    return snapshot


def _check_data(config: TrainConfig, snapshot: checkpoint.Snapshot, data: TrainingData) -> None:
    if snapshot.facts["data_fingerprint"] == data.fingerprint or config.checkpoint.accept_changes:
        return
    raise UserError(
        f"train: the text of data.files is not what {config.run_dir} was trained on; restore it, "
        "choose another run_dir, or set checkpoint.accept_changes"
    )


def model_config(config: TrainConfig, tokenizer: TextTokenizer) -> DecoderConfig:
    """The decoder's shape: the preset's or the folder's, with fresh weights fitted to the
    tokenizer.

    Raises: ValueError for an unknown preset, UserError where samples or tokens do not fit.
    """
    choice = config.model
    shape = load_config(choice.folder) if choice.folder is not None else preset(choice.preset)
    if choice.init == "random":
        least = shape.vocab_size if choice.folder is not None else 0
        shape = replace(shape, vocab_size=max(tokenizer.vocab_size, least))
        if choice.folder is None or config.data.tokenizer != "auto":
            # Ids of special tokens belong to the tokenizer, not to the shape.
            ends = (tokenizer.end_id,)
            shape = replace(shape, eos_token_ids=ends, bos_token_id=None, pad_token_id=None)
    if tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"train: the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary "
            f"{shape.vocab_size}; use the model's own tokenizer"
        )
    if config.data.seqlen > shape.max_seqlen:
        raise bad_value(
            "train",
            "data.seqlen",
            f"be at most the model's context ({shape.max_seqlen})",
            config.data.seqlen,
            "shorten the samples",
        )
    return shape


def build_model(config: TrainConfig, tokenizer: TextTokenizer, device: torch.device) -> Decoder:
    """The decoder with its first weights: fresh by (seed, parameter name), or the folder's."""
    shape, dtype = model_config(config, tokenizer), torch_dtype(config.dtype)
    if config.model.init == "weights":
        assert config.model.folder is not None
        return load_pretrained(config.model.folder, dtype=dtype, device=device)
    return Decoder(shape, device=device, dtype=dtype, seed=config.seed)


@torch.no_grad()
def _restore(model: Decoder, optimizer: PartOptimizer, snapshot: checkpoint.Snapshot) -> None:
    parameters = dict(model.named_parameters())
    if unmatched := sorted(parameters.keys() ^ snapshot.model.keys()):
        raise UserError(
            f"checkpoint: {len(unmatched)} parameters are in the model or the checkpoint only, "
            f"first {unmatched[0]}; choose another run_dir"
        )
    for name, parameter in parameters.items():
        if parameter.shape != snapshot.model[name].shape:
            raise UserError(
                f"checkpoint: {name} has shape {tuple(snapshot.model[name].shape)}, the model "
                f"{tuple(parameter.shape)}; choose another run_dir"
            )
        parameter.copy_(snapshot.model[name])
    optimizer.load_state_tensors(snapshot.optimizer)
    checkpoint.set_rng_state(snapshot.rng)


def _write_tokenizer(folder: Path, tokenizer: TextTokenizer) -> None:
    with atomic_dir(folder, overwrite=True) as temporary:
        for name, text in tokenizer.files().items():
            (temporary / name).write_text(text, encoding="utf-8")
