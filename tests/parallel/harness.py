"""Runs a function on some gloo ranks, forked from a server that has imported torch (spawning takes
seconds) and has never run it: a process that has run autograd cannot be forked on every build."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "ridgeline.parallel.verify", "tests.parallel.harness"])


def _rank(rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    place = Path(folder)
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = fn(rank, *args)
        (place / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (place / f"error{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # no atexit handlers of the test process


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 100.0
) -> list[Any]:
    """fn(rank, *args) on every rank -> their results, by rank.

    A rank that fails ends all; its traceback is the error's text.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, world_size, folder, fn, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout_s
        failed: int | None = None
        while any(process.is_alive() for process in ranks):
            failed = next((i for i, p in enumerate(ranks) if p.exitcode not in (None, 0)), None)
            if failed is not None or time.monotonic() > end:
                break
            time.sleep(0.005)
        if failed is None:
            failed = next((i for i, p in enumerate(ranks) if p.exitcode not in (None, 0)), None)
        if failed is not None:
            time.sleep(0.3)  # let the others write theirs
        timed_out = failed is None and any(process.is_alive() for process in ranks)
        for process in ranks:
            process.kill()
            process.join()
        errors = sorted(Path(folder).glob("error*"), key=lambda path: path.stat().st_mtime_ns)
        if errors or timed_out or failed is not None:
            text = "\n".join(f"{path.name}:\n{path.read_text()}" for path in errors)
            raise AssertionError(text or f"ranks hung for {timeout_s} s or died without a word")
        return [
            pickle.loads((Path(folder) / f"result{rank}").read_bytes())
            for rank in range(world_size)
        ]
