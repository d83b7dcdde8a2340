"""What a training run is told: frozen dataclasses, from which the flags are generated.

Every number has its unit and range under it. `load_config` reads a TOML file into them, flags go
over it (the file's values become the flags' defaults), `to_toml` prints the result, and two hashes
identify it: `config_hash` of everything (compared across ranks), `identity_hash` of what the
result depends on (compared with a checkpoint's before resuming).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ridgeline.core.errors import bad_value
from ridgeline.parallel.layout import Layout


def _require(ok: bool, arg: str, must: str, got: object, do: str) -> None:
    if not ok:
        raise bad_value("train", arg, must, got, do)


def _positive_int(arg: str, value: int) -> None:
    _require(value >= 1, arg, "be at least 1", value, "give a positive whole number")


def _finite(arg: str, value: float, low: float, high: float) -> None:
    ok = math.isfinite(value) and low <= value <= high
    _require(ok, arg, f"lie in [{low:g}, {high:g}]", value, "choose a value in that range")


PRESET_NAMES = (
    "tiny", "small", "medium", "smollm2-135m", "llama-1b", "llama-3b", "llama-8b", "llama-70b",
)  # fmt: skip
"""Of presets.py, whose shapes need PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which decoder is trained, and from which weights."""

    preset: str = "tiny"
    """Name of a built-in shape (tiny, smollm2-135m, llama-1b, llama-8b ...); unused with
    `folder`."""
    folder: Path | None = None
    """A Hugging Face folder (config.json, and safetensors with init = "weights")."""
    init: Literal["random", "weights"] = "random"
    """random: from (seed, parameter name); weights: the folder's, to train it further."""

    def __post_init__(self) -> None:
        known = self.folder is not None or self.preset in PRESET_NAMES
        must = f"be one of {', '.join(PRESET_NAMES)}"
        _require(known, "model.preset", must, repr(self.preset), "use one of these")
        if self.init == "weights":
            _require(
                self.folder is not None,
                "model.init",
                "be random where no model.folder is given",
                "weights",
                "name the folder that holds the weights",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Text files, how they fall into documents and tokens, and what is kept for evaluation."""

    files: tuple[Path, ...] = ()
    """UTF-8 text files (.jsonl: one JSON record a document), at least one to train."""
    eval_files: tuple[Path, ...] = ()
    """Text to evaluate on; none: `eval_fraction` of the documents of `files`."""
    eval_fraction: float = 0.02
    """Share of documents kept for evaluation where no eval_files are given, in [0, 0.5]."""
    documents: Literal["auto", "blank_line", "separator", "jsonl", "file"] = "auto"
    """What ends a document: a blank line, a line equal to `separator`, a JSON line, the file's end.
    auto: jsonl for .jsonl files, separator where one is given, else blank_line."""
    separator: str = ""
    """A line that stands between documents, for example <|endoftext|>; "" is none."""
    json_field: str = "text"
    """Field of a JSON record that holds the text."""
    tokenizer: str = "auto"
    """auto (the model folder's, else byte), byte (256 bytes), bpe (trained on `files`), or a path
    to a tokenizer.json or its folder."""
    vocab_size: int = 4096
    """Entries of the bpe tokenizer, in [258, 1000000]; unused by the others."""
    seqlen: int = 512
    """Tokens of a sample (packed documents), at least 2."""
    cache: Path | None = None
    """Folder for tokenized text; none: "tokens" in the user cache."""

    def __post_init__(self) -> None:
        _finite("data.eval_fraction", self.eval_fraction, 0.0, 0.5)
        _finite("data.vocab_size", self.vocab_size, 258, 1_000_000)
        _require(
            self.seqlen >= 2, "data.seqlen", "be at least 2", self.seqlen, "give a longer sample"
        )
        _require(
            bool(self.tokenizer),
            "data.tokenizer",
            "be named",
            "''",
            "use auto, byte, bpe or a path",
        )
        _require(bool(self.json_field), "data.json_field", "be named", "''", "use text")
        lines = self.separator.strip().splitlines()
        _require(
            self.separator == "" or len(lines) == 1,
            "data.separator",
            "be one line that is not blank",
            repr(self.separator),
            "use documents = blank_line for blank lines",
        )
        if self.documents == "separator":
            _require(
                bool(self.separator),
                "data.separator",
                "be given with documents = separator",
                "''",
                "name the line that stands between documents",
            )
        elif self.separator:
            _require(
                self.documents == "auto",
                "data.separator",
                f"be empty with documents = {self.documents}",
                repr(self.separator),
                "use documents = separator",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with warmup and cosine decay."""

    lr: float = 1e-3
    """Peak learning rate, in [0, 10]."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step over the peak, in [0, 1]."""
    warmup_steps: int | None = None
    """Steps of linear rise to the peak, at least 0; none: a tenth of the run, 20 at the most."""
    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator, in [0, 1]."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices (not of norms and biases), in [0, 1]."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm is clipped to this, above 0; none: not clipped."""

    def __post_init__(self) -> None:
        _finite("optim.lr", self.lr, 0.0, 10.0)
        _finite("optim.min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            "optim.warmup_steps",
            "be at least 0",
            self.warmup_steps,
            "use 0 for no warmup",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(
                0.0 <= value < 1.0, f"optim.{name}", "lie in [0, 1)", value, "usual: 0.9, 0.95"
            )
        _finite("optim.eps", self.eps, 0.0, 1.0)
        _finite("optim.weight_decay", self.weight_decay, 0.0, 1.0)
        if self.max_grad_norm is not None:
            _require(
                self.max_grad_norm > 0.0,
                "optim.max_grad_norm",
                "be above 0",
                self.max_grad_norm,
                "leave it out (none) to not clip",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run's state is saved, and what a start does with an earlier one."""

    every_steps: int = 100
    """Steps between checkpoints, at least 0; 0: only at the end and when interrupted."""
    keep_last: int = 2
    """Checkpoints kept, at least 1."""
    resume: Literal["auto", "never", "always"] = "auto"
    """auto: go on from the newest good one if there is one; never: refuse a folder that has one;
    always: fail where there is none."""
    accept_changes: bool = False
    """Resume although the config differs from the checkpoint's (it is listed otherwise)."""
    asynchronous: bool = True
    """Write a checkpoint beside the training, from a copy of the state in host memory; off: the
    training waits, and no copy is made."""
    export: bool = True
    """Write a Hugging Face folder (<run>/model) when the last step is done."""

    def __post_init__(self) -> None:
        _require(
            self.every_steps >= 0,
            "checkpoint.every_steps",
            "be at least 0",
            self.every_steps,
            "use 0 to save only at the end",
        )
        _positive_int("checkpoint.keep_last", self.keep_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is measured and where it goes."""

    every_steps: int = 1
    """Steps between rows of metrics.jsonl, at least 1."""
    eval_every_steps: int = 0
    """Steps between evaluations, at least 0; 0: only after the last step."""
    eval_samples: int = 64
    """Samples of an evaluation at the most, at least 1."""
    peak_tflops: float | None = None
    """What MFU divides by, TFLOP/s (989 is the H100's and H200's datasheet bf16 rate); none: the
    ceiling that `ridgeline doctor` measured on this machine, or the default of its family."""
    tensorboard: bool = False
    """Also write TensorBoard events to <run>/tensorboard (needs the tensorboard package)."""
    breakdown_every_steps: int = 50
    """Steps between those that are profiled for the split of a step's time (several ranks only; the
    second step is the first), at least 0; 0: none."""
    profile_step: int | None = None
    """Step (the first is 1) whose profiler trace each rank writes to <run>/profile; none: no
    trace."""

    def __post_init__(self) -> None:
        _positive_int("log.every_steps", self.every_steps)
        _positive_int("log.eval_samples", self.eval_samples)
        _require(
            self.eval_every_steps >= 0,
            "log.eval_every_steps",
            "be at least 0",
            self.eval_every_steps,
            "use 0 for an evaluation at the end only",
        )
        if self.peak_tflops is not None:
            _require(
                math.isfinite(self.peak_tflops) and self.peak_tflops > 0,
                "log.peak_tflops",
                "be above 0",
                self.peak_tflops,
                "leave it out for this machine's measured ceiling",
            )
        _require(
            self.breakdown_every_steps >= 0,
            "log.breakdown_every_steps",
            "be at least 0",
            self.breakdown_every_steps,
            "use 0 for none",
        )
        if self.profile_step is not None:
            _positive_int("log.profile_step", self.profile_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run."""

    run_dir: Path = Path("runs/train")
    """Folder of the run: config.toml, metrics.jsonl, checkpoints/, model/."""
    steps: int = 200
    """Optimizer steps in all, at least 1."""
    batch_samples: int = 8
    """Samples of a step (the global batch; tokens of a step: x data.seqlen), at least 1."""
    micro_batch_samples: int = 8
    """Samples that pass through the model at once on a rank; divides batch_samples over the
    layout's data ranks. Unused with layout.num_microbatches."""
    seed: int = 0
    """Of the init and of the data order, in [0, 2^63)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; with bfloat16 the optimizer keeps fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    loss_chunk_tokens: int | None = None
    """Tokens whose fp32 logits exist at once, at least 1; none: as many as fit 64 MiB (on a GPU
    1 GiB)."""
    timeout_s: float = 600.0
    """Seconds without a finished step, save or evaluation after which a run of several ranks is
    given up with a report of who waits for whom, in [1, 86400]."""
    layout: Layout = field(default_factory=Layout)
    model: ModelChoice = field(default_factory=ModelChoice)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_samples", "micro_batch_samples"):
            _positive_int(name, getattr(self, name))
        self._check_micro_batches()
        _finite("timeout_s", self.timeout_s, 1.0, 86400.0)
        _require(
            0 <= self.seed < 2**63, "seed", "lie in [0, 2^63)", self.seed, "choose another seed"
        )
        if self.loss_chunk_tokens is not None:
            _positive_int("loss_chunk_tokens", self.loss_chunk_tokens)
        _require(
            self.optim.warmup_steps is None or self.optim.warmup_steps <= self.steps,
            "optim.warmup_steps",
            f"be at most steps ({self.steps})",
            self.optim.warmup_steps,
            "warm up for fewer steps",
        )

    def _check_micro_batches(self) -> None:
        dp, given = self.layout.dp, self.layout.num_microbatches
        over = f" over {dp} data ranks" if dp > 1 else ""
        if given is not None:
            _require(
                self.batch_samples % (dp * given) == 0,
                "layout.num_microbatches",
                f"divide batch_samples ({self.batch_samples}){over}",
                given,
                "choose a divisor",
            )
            return
        _require(
            self.batch_samples % (dp * self.micro_batch_samples) == 0,
            "micro_batch_samples",
            f"divide batch_samples ({self.batch_samples}){over}",
            self.micro_batch_samples,
            "choose a divisor",
        )

    @property
    def num_micro_batches(self) -> int:
        """Forward-backward passes of a step on a rank (gradient accumulation)."""
        dp = self.layout.dp
        return self.layout.num_microbatches or self.batch_samples // (dp * self.micro_batch_samples)

    @property
    def samples_at_once(self) -> int:
        """Samples of a micro-batch."""
        return self.batch_samples // (self.layout.dp * self.num_micro_batches)


def require_files(config: TrainConfig) -> None:
    """Check what a config may lack while flags are still to come: text to train on.

    Raises: ValueError where data.files is empty.
    """
    _require(
        bool(config.data.files), "data.files", "name at least one text file", "none", "give a path"
    )


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain values (paths as strings, tuples as lists): JSON and TOML can carry it."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def config_hash(config: TrainConfig) -> str:
    """16 hex digits that identify the whole config."""
    return _digest(to_dict(config))


# What changes neither the samples' order nor, beyond rounding, the numbers.
_NOT_IDENTITY = {
    "": {
        "run_dir",
        "device",
        "micro_batch_samples",
        "loss_chunk_tokens",
        "timeout_s",
        "layout",
        "checkpoint",
        "log",
    },
    "data": {"files", "eval_files", "cache"},
}


def identity(config: TrainConfig) -> dict[str, Any]:
    """The part of a config on which a run's losses depend; files count by content (data
    fingerprint)."""
    whole = to_dict(config)
    kept = {k: v for k, v in whole.items() if k not in _NOT_IDENTITY[""]}
    kept["data"] = {k: v for k, v in whole["data"].items() if k not in _NOT_IDENTITY["data"]}
    return kept


def identity_hash(config: TrainConfig) -> str:
    """16 hex digits that identify what a resumed run must share with the run that it resumes."""
    return _digest(identity(config))


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested dicts differ, as "optim.lr: 0.001 -> 0.002" lines."""
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before} -> {after}")
    return found


def _digest(plain: dict[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_checkpoint(source: Path) -> bool:
    """Whether a folder is a checkpoint, or a run folder that has some."""
    return (source / "state.json").is_file() or (source / "checkpoints").is_dir()
