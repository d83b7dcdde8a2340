"""How a run starts: checkpoint to go on from, tokenizer, data, model and optimizer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core import env, progress
from ridgeline.core.errors import UserError, bad_value
from ridgeline.core.files import atomic_dir, atomic_write_text
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.hf import load_config
from ridgeline.nn.overwrite import why_foreign
from ridgeline.parallel.checkpoint import newest_whole, scan
from ridgeline.parallel.layout import Workload, check_layout
from ridgeline.train.checkpoint import restore, tokenizer_files
from ridgeline.train.config import TrainConfig, differences, identity, identity_hash
from ridgeline.train.data import TrainingData, load_data
from ridgeline.train.presets import preset
from ridgeline.train.ranks import Ranks, told_once
from ridgeline.train.tokens import TextTokenizer, choose_tokenizer, parse_tokenizer
from ridgeline.train.toml import to_toml
from ridgeline.train.worker import ManyProcesses, OneProcess, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a training loop works on."""

    config: TrainConfig
    device: torch.device
    ranks: Ranks
    tokenizer: TextTokenizer
    data: TrainingData
    worker: Worker
    step: int
    """Steps done before this process."""
    consumed_samples: int
    resumed_from: int | None
    """Step of the checkpoint that is gone on from."""


def choose_device(name: str) -> torch.device:
    """The device that a config asks for. Raises: UserError for cuda where there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("train: no CUDA device is usable here; use --device cpu")
    return torch.device(name)


def prepare(config: TrainConfig, device: torch.device, ranks: Ranks) -> Start:
    """Read or make everything that the loop needs; the run folder's lock is held by the caller.

    Raises: ValueError and UserError as `train`, on every rank.
    """
    ranks.together(lambda: _check_export(config))
    found = _checkpoint(config, ranks)
    tokenizer, data = ranks.in_turn(lambda: _texts(config, found))
    shape = ranks.together(lambda: model_config(config, tokenizer))
    told = ranks.together(lambda: _check_layout(config, shape))
    for text in told if ranks.is_first else ():
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    worker = ranks.together(lambda: _worker(config, shape, device))
    if found is not None:
        with told_once():
            restore(found[0], worker.pieces(), worker.optimizer, rank=ranks.rank, group=ranks.talk)
    ranks.first(lambda: _write_run_files(config, tokenizer))
    return Start(
        config=config,
        device=device,
        ranks=ranks,
        tokenizer=tokenizer,
        data=data,
        worker=worker,
        step=found[1]["step"] if found else 0,
        consumed_samples=found[1]["consumed_samples"] if found else 0,
        resumed_from=found[1]["step"] if found else None,
    )


Found = tuple[Path, dict[str, Any]]
"""A checkpoint and its state.json."""


def _checkpoint(config: TrainConfig, ranks: Ranks) -> Found | None:
    """The checkpoint to go on from, checked against the config, the same on every rank."""
    folder, resume = config.run_dir / "checkpoints", config.checkpoint.resume
    if resume == "never":

        def refuse() -> None:
            if scan(folder):
                raise UserError(
                    f"train: {folder} has checkpoints and checkpoint.resume is never; choose "
                    "another run_dir, or resume"
                )

        ranks.together(refuse)
        return None
    with told_once():
        found = newest_whole(folder, ranks.talk)
        if found is None:
            if resume == "always":
                raise UserError(f"train: {folder} has no good checkpoint and resume is always")
            return None
        changes = _changes(config, found[1]["facts"])
    if changes and ranks.is_first:
        progress.say(f"resuming with changes: {changes}")
    return found


def _changes(config: TrainConfig, facts: dict[str, Any]) -> str:
    """What differs from the checkpoint's config and was accepted. Raises: UserError otherwise."""
    if facts["identity_hash"] == identity_hash(config):
        return ""
    changed = "; ".join(differences(facts["identity"], identity(config)))
    if not config.checkpoint.accept_changes:
        raise UserError(
            f"train: the config differs from the checkpoint's in {config.run_dir} "
            f"({changed}); restore it, choose another run_dir, or set "
            "checkpoint.accept_changes"
        )
    return changed


def _texts(config: TrainConfig, found: Found | None) -> tuple[TextTokenizer, TrainingData]:
    if found is None:
        tokenizer = choose_tokenizer(config.data, config.model.folder)
        return tokenizer, load_data(config.data, tokenizer, config.seed)
    extra = tokenizer_files(found[0])
    text = extra.pop("tokenizer.json")
    tokenizer = parse_tokenizer(text, "the checkpoint's tokenizer", extra)
    data = load_data(config.data, tokenizer, config.seed)
    same = found[1]["facts"]["data_fingerprint"] == data.fingerprint
    if not same and not config.checkpoint.accept_changes:
        raise UserError(
            f"train: the text of data.files is not what {config.run_dir} was trained on; restore "
            "it, choose another run_dir, or set checkpoint.accept_changes"
        )
    return tokenizer, data


def _check_layout(config: TrainConfig, shape: DecoderConfig) -> list[str]:
    work = Workload(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        seqlen=config.data.seqlen,
        num_microbatches=config.num_micro_batches,
        windowed=shape.sliding_window is not None,
    )
    local = env.local_world_size() if env.world_size() > 1 else None
    return check_layout(config.layout, work, world_size=env.world_size(), local_world_size=local)


def _worker(config: TrainConfig, shape: DecoderConfig, device: torch.device) -> Worker:
    kind = OneProcess if env.world_size() == 1 else ManyProcesses
    return kind(config, shape, device)


def export_folder(config: TrainConfig) -> Path:
    """Where the trained model goes."""
    return config.run_dir / "model"


def _check_export(config: TrainConfig) -> None:
    """Refuse to export over what ridgeline did not write, before hours of training."""
    if not config.checkpoint.export:
        return
    out = export_folder(config)
    source = config.model.folder
    if source is not None and out.exists() and out.resolve() == source.resolve():
        raise UserError(
            f"train: model.folder must not be {out}, where the trained model is written; choose "
            "another run_dir or set checkpoint.export to false"
        )
    if (reason := why_foreign(out)) is not None:
        raise UserError(
            f"train: {out} must be a model folder to be replaced by the trained model, got one "
            f"{reason}; choose another run_dir, move it away, or set checkpoint.export to false"
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


def _write_run_files(config: TrainConfig, tokenizer: TextTokenizer) -> None:
    atomic_write_text(config.run_dir / "config.toml", to_toml(config))
    with atomic_dir(config.run_dir / "tokenizer", overwrite=True) as temporary:
        for name, text in tokenizer.files().items():
            (temporary / name).write_text(text, encoding="utf-8")
