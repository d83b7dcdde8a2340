"""`ridgeline serve`: a model folder over OpenAI's API, with a chat page at /.

This module imports no torch: flags that cannot be, a folder that is not there and a port in use are
refused in a fraction of a second; the work is in serve_work.py.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.core import env, progress
from ridgeline.core.dtypes import Device, RunDtype
from ridgeline.core.errors import UserError, bad_value
from ridgeline.core.model_folder import check_model_folder
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits import Limits
from ridgeline.engine.server.config import ServerConfig, is_loopback
from ridgeline.engine.server.listen import bind

QUICKSTART = "quickstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model folder over OpenAI's API, with a chat page at /."""

    model: str = QUICKSTART
    """A Hugging Face folder, plain or quantized; quickstart: SmolLM2-135M in 4 bits. Also the
    command's first word: ridgeline serve DIR."""
    name: str | None = None
    """What clients call the model; the folder's name unless given."""
    host: str = "127.0.0.1"
    """Address to listen on; another than this machine's own needs a key."""
    port: int = 8000
    """0: any free port."""
    api_key_file: Path | None = None
    """A file with a key a line; RIDGELINE_API_KEY does for one. None: no key is asked for."""
    without_key: bool = False
    """Listen to other machines without a key."""
    dry_run: bool = False
    """Say what would fit where, and stop."""
    dtype: RunDtype = "auto"
    """Of activations and plain weights; auto: bfloat16 on a GPU and for 4-bit weights, else
    float32."""
    device: Device = "auto"
    """auto: the GPU where there is one."""
    tensor_parallel: int = 1
    """GPUs that share the model, a process each (with --device cpu: processes); started here, or
    torchrun's."""
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = "auto"
    """Of the KV cache; auto: as activations."""
    max_model_len: int | None = None
    """Tokens of prompt plus output; the model's context unless given."""
    max_num_seqs: int | None = None
    """Sequences in a batch; 64 on a GPU, 16 on a CPU unless given."""
    max_step_tokens: int | None = None
    """Tokens of a step, prompts' chunks included; 2048 on a GPU, 512 on a CPU unless given."""
    memory_gib: float | None = None
    """For the KV cache; what is free, within reason, unless given."""
    prefix_cache: bool = True
    """Keep the KV pages of prompts for those that start alike."""
    batch_invariant: bool = False
    """The same tokens whatever else is in the batch; slower."""
    speculate_tokens: int = 0
    """Tokens proposed by prompt lookup, checked in one step; 0: none."""
    cuda_graphs: bool = True
    """Capture decode steps, when first needed."""
    max_queue_requests: int = 256
    """Requests inside; more get a 429."""
    max_queue_tokens: int = 262_144
    """Tokens that they may come to, prompts and outputs; more get a 429."""
    deadline_s: float = 600.0
    """A request that takes longer is ended."""
    drain_s: float = 30.0
    """After SIGTERM: how long requests in flight may go on."""
    watch: Path | None = None
    """A folder of model folders (a run's checkpoints): the newest is loaded when it appears."""
    reload_root: Path | None = None
    """Folders that POST /admin/reload may name lie in it."""

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.without_key and not self._has_key():
            raise bad_value(
                "serve", "host", "be this machine's own where no key is set", self.host,
                "set RIDGELINE_API_KEY or --api-key-file, or say --without-key",
            )  # fmt: skip
        self.engine(self.dtype)

    def _has_key(self) -> bool:
        return self.api_key_file is not None or env.api_key() is not None

    def server(self, name: str) -> ServerConfig:
        """The server's part. Raises: UserError for a key file that cannot be read."""
        return ServerConfig(
            host=self.host,
            port=self.port,
            model_name=self.name or name,
            api_keys=read_keys(self.api_key_file),
            max_requests=self.max_queue_requests,
            deadline_s=self.deadline_s,
            drain_s=self.drain_s,
            watch=self.watch,
            reload_root=self.reload_root,
        )

    def engine(self, dtype: str) -> EngineConfig:
        """The engine's part; what is None takes the engine's own default. Raises: ValueError."""
        given = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_step_tokens": self.max_step_tokens,
            "memory_gib": self.memory_gib,
        }
        return EngineConfig(
            dtype=dtype,
            device=self.device,
            tensor_parallel=self.tensor_parallel,
            kv_dtype=self.kv_dtype,
            prefix_cache=self.prefix_cache,
            batch_invariant=self.batch_invariant,
            speculate_tokens=self.speculate_tokens,
            cuda_graphs=self.cuda_graphs,
            whole_cache=True,
            limits=Limits(
                max_queue_requests=self.max_queue_requests, max_queue_tokens=self.max_queue_tokens
            ),
            **{name: value for name, value in given.items() if value is not None},
        )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line, and of the environment. Raises: UserError."""
    keys = [key] if (key := env.api_key()) else []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"serve: could not read the keys in {path}: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UserError(
                f"serve: api_key_file {path} must hold a key a line, got none; write one"
            )
        keys += found
    return tuple(keys)


def serve(config: ServeConfig) -> Result:
    """Serve until SIGTERM or Ctrl-C; returns how it ended.

    Raises: UserError for a folder that is no model, a model that does not fit, a port in use.
    """
    start = time.monotonic()
    if config.model != QUICKSTART:
        check_model_folder(Path(config.model), "serve: model")
    if config.dry_run or env.rank():
        work = importlib.import_module("ridgeline.cli.serve_work")
        folder = folder_of(config.model)
        return work.dry_run(config, folder) if config.dry_run else work.follow(config, folder)
    config.server(QUICKSTART)  # refuses what it would refuse under the folder's name
    for name, root in (("watch", config.watch), ("reload_root", config.reload_root)):
        if root is not None and not root.is_dir():
            raise UserError(f"serve: {name} must be a folder, got {root}; make it first")
    bound = bind(config.host, config.port)  # before PyTorch and the weights
    try:
        folder = folder_of(config.model)
        work = importlib.import_module("ridgeline.cli.serve_work")
        return work.run(config, folder, bound, start)
    finally:
        bound.close()


def folder_of(model: str) -> Path:
    """The folder that `--model` means. Raises: UserError."""
    return quickstart_folder() if model == QUICKSTART else Path(model)


def quickstart_folder() -> Path:
    """The quickstart's 4-bit model; where it has not run, one rounded to 4 bits in seconds."""
    made = env.cache_dir() / QUICKSTART / "smollm2-135m-gptq-w4g64"
    if (made / "config.json").is_file():
        return made
    rounded = env.cache_dir() / "models" / "smollm2-135m-rtn-w4g64"
    if not (rounded / "config.json").is_file():
        progress.say("no quickstart has run here: rounding SmolLM2-135M to 4 bits, once")
        importlib.import_module("ridgeline.cli.rounded").round_to(rounded)
    return rounded


def first_word(words: list[str]) -> tuple[Any, list[str]]:
    """`ridgeline serve DIR` is `ridgeline serve --model DIR`."""
    if words and not words[0].startswith("-"):
        return ServeConfig(model=words[0]), words[1:]
    return None, words


def show(result: Result) -> str:
    """The plan of a dry run, or how it ended."""
    if result.get("dry_run"):
        return "\n".join(result["lines"])
    return "stopped; every request had its end" if result["drained"] else "stopped"


COMMAND = Command(
    run=serve, config=ServeConfig, show=show, kept=nothing_kept, defaults=first_word,
    flags={
        "model_name": "--name", "api_keys": "keys of --api-key-file and RIDGELINE_API_KEY"
    },
)  # fmt: skip
