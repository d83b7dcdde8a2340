"""What `ridgeline serve` does once its arguments have passed and its port is bound."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import sys
import time
from pathlib import Path

from ridgeline.cli.command import Result
from ridgeline.cli.serve import ServeConfig
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.llm import LLM
from ridgeline.engine.load import is_quantized
from ridgeline.engine.memory import plan
from ridgeline.engine.server.listen import address_of
from ridgeline.engine.server.run import quiet_libraries, serve
from ridgeline.engine.server.state import ServerState


def run(config: ServeConfig, folder: Path, bound: socket.socket, start: float) -> Result:
    """Serve on a bound socket. start: time.monotonic() of the command's start."""
    engine = AsyncEngine.open(folder, _engine_config(config, folder))
    _set_logging()
    finished = asyncio.run(
        serve(
            engine,
            config.server(folder.name),
            bound,
            folder=folder,
            ready=lambda state: _say_ready(state, address_of(bound), start),
        )
    )
    return {"folder": str(folder), "drained": finished}


def dry_run(config: ServeConfig, folder: Path) -> Result:
    """What would fit where."""
    ranks = max(config.tensor_parallel, env.world_size())
    memory = plan(folder, _engine_config(config, folder), ranks)
    return {"folder": str(folder), "dry_run": True, "lines": list(memory.lines())}


def follow(config: ServeConfig, folder: Path) -> Result:
    """Another rank of torchrun's: what rank 0 says, until it says stop. Signals are rank 0's."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        llm = LLM(folder, _engine_config(config, folder))
        llm.follow()
        llm.close()
    except RuntimeError as error:
        raise UserError(f"serve: rank {env.rank()}: {error}") from error
    return {"folder": str(folder), "drained": True}


def _engine_config(config: ServeConfig, folder: Path) -> EngineConfig:
    """dtype auto is bfloat16 for 4-bit weights, on a CPU too."""
    quantized = config.dtype == "auto" and is_quantized(folder)
    return config.engine("bfloat16" if quantized else config.dtype)


def _set_logging() -> None:
    logging.basicConfig(
        level=logging.INFO if progress.mode() != "quiet" else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    quiet_libraries()


def _say_ready(state: ServerState, address: str, start: float) -> None:
    seconds = time.monotonic() - start
    info, config = state.engine.info, state.config
    progress.event(
        "serving",
        url=address,
        model=config.model_name,
        seconds=round(seconds, 2),
        info=dataclasses.asdict(info),
    )
    key = "with a key" if config.api_keys else "without a key"
    page = f"{address}/" + ("" if state.template else " (no chat template: completions only)")
    progress.say(
        f"serving {config.model_name} ({info.weights}, {info.dtype}, {info.device}) at {address} "
        f"{key}, ready in {seconds:.1f} s\n"
        f"  chat:    {page}\n"
        f"  OpenAI:  base_url={address}/v1  model={config.model_name}\n"
        f"  context {info.max_model_len:,} tokens; KV cache {info.kv_bytes / 2**30:.2f} GiB "
        f"(--memory-gib): {info.num_pages:,} pages of {info.page_tokens} tokens in {info.kv_dtype}"
        "; Ctrl-C stops"
    )
