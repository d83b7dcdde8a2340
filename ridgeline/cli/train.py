"""`ridgeline train`: text files to a trained decoder, interruptible and resumable; on one process,
or under `torchrun -m ridgeline train` on as many as the layout asks for.

What the flags alone get wrong is refused before PyTorch is imported.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, fields
from pathlib import Path

from ridgeline.cli.command import Command, Result
from ridgeline.core import env
from ridgeline.core.errors import bad_value
from ridgeline.parallel.layout import AXES, Layout, check_sizes
from ridgeline.train.config import TrainConfig, require_files
from ridgeline.train.toml import load_config

SIGNALS = ("SIGINT", "SIGTERM")


def train(config: TrainConfig) -> Result:
    """Train a decoder on text files, going on from the run folder's newest good checkpoint.

    Raises: what ridgeline.train.trainer.train raises; KeyboardInterrupt after a signal stopped it,
    its state saved.
    """
    require_files(config)
    check_sizes(config.layout.sizes, env.world_size())
    trainer = importlib.import_module("ridgeline.train.trainer")
    result = trainer.train(config, print_config=True)
    if result.interrupted in SIGNALS:
        raise KeyboardInterrupt
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(result).items()
    }


def show(result: Result) -> str:
    """The end of the run in a few lines."""
    loss = f"loss {result['losses'][-1]:.4f}" if result["losses"] else "no step was left to do"
    held_out = (
        "" if result["eval_loss"] is None else f", {result['eval_loss']:.4f} on held-out text"
    )
    rate, ranks = result["tokens_per_s"], result["ranks"]
    each = f" ({rate / ranks:,.0f} on each of {ranks} processes)" if ranks > 1 else ""
    lines = [
        f"step {result['step']} of {result['steps']}: {loss}{held_out}",
        f"{rate:,.0f} tokens/s{each}, MFU {100 * result['mfu_causal']:.1f} % causal, "
        f"{100 * result['mfu_noncausal']:.1f} % non-causal counting",
    ]
    if result["checkpoint"]:
        lines.append(f"checkpoint  {result['checkpoint']}")
    if result["exported"]:
        lines.append(f"model       {result['exported']}")
    return "\n".join(lines)


def kept(config: TrainConfig) -> str:
    """After Ctrl-C."""
    folder = config.run_dir / "checkpoints"
    newest = max(folder.glob("step-*"), default=None)
    if newest is None:
        return f"no checkpoint was due yet in {folder}"
    return f"{newest} is kept; the same command goes on from there"


def config_file(words: list[str]) -> tuple[TrainConfig | None, list[str]]:
    """Take `--config FILE` out of the flags; its values become the flags' defaults.

    Raises: ValueError where no file follows, or for layout flags that do not multiply to the number
    of ranks; what load_config raises.
    """
    start, rest = _config_file(words)
    _check_layout_flags(rest, {} if start is None else start.layout.sizes)
    return start, rest


def _check_layout_flags(words: list[str], given: dict[str, int]) -> None:
    """Refuse sizes whose product is wrong before anything that follows from them (the batch), but
    not before the parser has told of a flag that there is not: a size may be meant by it."""
    sizes, known = dict(given), {field.name for field in fields(Layout)}
    for word, after in zip(words, [*words[1:], ""], strict=False):  # no words: nothing
        name, equals, value = word.partition("=")
        if not name.startswith("--layout."):
            continue
        option = name.removeprefix("--layout.").replace("-", "_")
        if option not in known and option.removeprefix("no_") not in known:
            return
        value = value if equals else after
        if option in AXES and value.isdecimal():
            sizes[option] = int(value)
    if all(sizes.values()) and "-h" not in words and "--help" not in words:
        check_sizes(sizes, env.world_size())


def _config_file(words: list[str]) -> tuple[TrainConfig | None, list[str]]:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--config":
            continue
        rest = words[:index] + words[index + (1 if equals else 2) :]
        if not equals:
            if index + 1 == len(words):
                raise bad_value("train", "--config", "name a TOML file", "nothing", "add its path")
            value = words[index + 1]
        return load_config(Path(value)), rest
    return None, words


COMMAND = Command(
    run=train,
    config=TrainConfig,
    show=show,
    kept=kept,
    defaults=config_file,
    note="--config FILE reads a TOML file first; its values become the defaults below. Many "
    "processes are started by torchrun, see docs/train.md.",
)
