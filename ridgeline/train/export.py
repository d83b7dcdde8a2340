"""A trained model as a Hugging Face folder, from a run of any layout or from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.hf import MAX_SHARD_BYTES, write_folder
from ridgeline.parallel.checkpoint import newest_whole, verify
from ridgeline.parallel.storage import iterate_whole
from ridgeline.train.checkpoint import MODEL, tokenizer_files
from ridgeline.train.ranks import Ranks
from ridgeline.train.worker import Worker


def export(worker: Worker, folder: Path, dtype: torch.dtype, tokenizer: Path, ranks: Ranks) -> None:
    """Write the model that the ranks train, each parameter gathered in its turn.

    A collective call; rank 0 writes. Raises: UserError on every rank where its disk refuses.
    """
    parameters = worker.whole_parameters()

    def write() -> None:
        config = worker.shape.to_hf() | {"torch_dtype": dtype_name(dtype)}
        try:
            write_folder(folder, config, parameters, companions=tokenizer, overwrite=True)
        finally:
            for _ in parameters:  # the others are still in their turns
                pass

    def join() -> None:
        for _ in parameters:
            pass

    ranks.together(write if ranks.is_first else join)


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> tuple[Path, str]:
    """Write a checkpoint of any layout (or a run's newest good one) as a Hugging Face folder.

    dtype: of the weights; None: the run's. Returns the checkpoint read and the dtype written.
    Raises: UserError where the checkpoint is not whole or the disk refuses.
    """
    if (source / "state.json").is_file():
        path, state = source, verify(source)
    else:
        found = newest_whole(source / "checkpoints")
        if found is None:
            raise UserError(f"convert: {source} has no good checkpoint; train first")
        path, state = found
    wanted = torch_dtype(dtype or state["config"]["dtype"])
    shape = DecoderConfig.from_hf(state["facts"]["model"])

    def companions(folder: Path) -> None:
        for name, text in tokenizer_files(path).items():
            (folder / name).write_text(text, encoding="utf-8")

    write_folder(
        out,
        shape.to_hf() | {"torch_dtype": dtype_name(wanted)},
        _rounded(path, wanted),
        companions=companions,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )
    return path, dtype_name(wanted)


def _rounded(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    for name, tensor in iterate_whole(path, MODEL):
        yield name, tensor.to(dtype)
