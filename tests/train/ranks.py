"""Runs of several ranks in tests: forked from a server that has imported torch and never run it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Forking a process that has run autograd or OpenMP is not safe, so children come from a server.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "ridgeline.train.trainer", "tests.train.ranks"])


@dataclass(frozen=True)
class Outcome:
    """What became of a rank."""

    code: int | None
    """Exit code; None: it had to be killed."""
    value: Any
    """What the function returned."""
    said: str
    """stdout and stderr."""


def _enter(rank: int, size: int, port: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    said = open(f"{folder}/said{rank}", "w")
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    code = 1
    try:
        value = fn(*args)
        Path(f"{folder}/value{rank}").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(
    folder: Path, size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Outcome]:
    """fn(*args) on `size` ranks that find each other as torchrun's do."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("said*"), *folder.glob("value*")):
        path.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        CONTEXT.Process(target=_enter, args=(rank, size, port, str(folder), fn, args))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    found = []
    for rank, process in enumerate(ranks):
        code = process.exitcode
        process.kill()
        process.join()
        value, said = folder / f"value{rank}", folder / f"said{rank}"
        found.append(
            Outcome(
                code=code,
                value=pickle.loads(value.read_bytes()) if value.exists() else None,
                said=said.read_text() if said.exists() else "",
            )
        )
    return found


def done(outcomes: list[Outcome]) -> list[Any]:
    """The ranks' values, all of which must have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}:\n{outcome.said}"
    return [outcome.value for outcome in outcomes]


# ---- what ranks do -------------------------------------------------------------------------------


def train_ranks(config: Any, stop_at_step: int | None = None) -> Any:
    from ridgeline.train.trainer import train

    return train(config, stop_at_step=stop_at_step)


def reload_and_save(config: Any, step: int) -> None:
    """Resume as training would, and save what was read as a checkpoint of another step."""
    import torch

    from ridgeline.parallel.checkpoint import Record, Saver
    from ridgeline.train.checkpoint import run_state
    from ridgeline.train.config import config_hash, identity, identity_hash, to_dict
    from ridgeline.train.ranks import open_ranks
    from ridgeline.train.start import prepare

    with open_ranks(config, torch.device("cpu")) as ranks:
        start = prepare(config, torch.device("cpu"), ranks)
        torch.manual_seed(1000 + ranks.rank)
        facts = {
            "config_hash": config_hash(config),
            "identity_hash": identity_hash(config),
            "identity": identity(config),
            "data_fingerprint": start.data.fingerprint,
            "model": start.worker.shape.to_hf(),
        }
        record = Record(
            step=step,
            consumed_samples=start.consumed_samples,
            config=to_dict(config),
            facts=facts,
            tokenizer=start.tokenizer.files(),
        )
        state = run_state(start.worker.pieces(), start.worker.optimizer, ranks.rank)
        saver = Saver(config.run_dir / "checkpoints", keep_last=20, group=ranks.save)
        saver.save(record, state)


def train_and_die(config: Any, dying_rank: int, when: str) -> None:
    """Train; one rank is killed in the middle of step 5, or of saving step 4."""
    import signal

    from ridgeline.parallel import storage
    from ridgeline.train import trainer, worker

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == dying_rank and when == "step":
        steps = []
        batch_of = worker._batch_of

        def dying_batch(samples: Any, indices: Any) -> Any:
            steps.append(1)
            if len(steps) > 4 * 2:
                die()
            return batch_of(samples, indices)

        worker._batch_of = dying_batch
    elif int(os.environ["RANK"]) == dying_rank:
        write = storage.write_tensors

        def dying_write(path: Path, tensors: Any) -> Any:
            facts = write(path, tensors)
            if "step-00000004" in str(path) and path.name.startswith("optimizer"):
                die()
            return facts

        storage.write_tensors = dying_write
    trainer.train(config)


def train_on_a_full_disk(config: Any, rank: int) -> None:
    """Train; one rank cannot write its part of step 4."""
    from ridgeline.parallel import storage
    from ridgeline.train import trainer

    write = storage.write_tensors

    def full(path: Path, tensors: Any) -> Any:
        if int(os.environ["RANK"]) == rank and "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    storage.write_tensors = full
    trainer.train(config)


def train_and_hang(config: Any, sleeping_rank: int) -> None:
    """Train; one rank falls asleep before step 3."""
    from ridgeline.train import trainer

    compute = trainer._Run._compute

    def sleepy(run: Any, indices: Any, stop: Any) -> bool:
        if run.step == 2 and run.ranks.rank == sleeping_rank:
            time.sleep(1000)
        return compute(run, indices, stop)

    trainer._Run._compute = sleepy
    trainer.train(config)


def train_with_a_typo(words: list[str]) -> None:
    """`ridgeline train` with a plan whose key names no module."""
    import functools

    from ridgeline.parallel.plans.decoder import decoder_plan
    from ridgeline.train import worker

    def plan_of(config: Any, split: Any) -> Any:
        plan = dict(decoder_plan(config, split))
        plan["model.layers.*.mlp.gate_prj"] = plan.pop("model.layers.*.mlp.gate_proj")
        return plan

    worker.ParallelModel = functools.partial(worker.ParallelModel, plan_of=plan_of)
    command_line(words)


def train_sharded_first(words: list[str]) -> None:
    """`ridgeline train` where blocks are wrapped for recomputation once they are sharded."""
    from ridgeline.parallel import fsdp, model

    shard = fsdp.shard_module

    def late(module: Any, *args: Any, **named: Any) -> None:
        shard(module, *args, **named)
        model.wrap_block(module, "full", 32)

    fsdp.shard_module = late
    command_line(words)


def train_on_small_nodes(words: list[str]) -> None:
    """`ridgeline train` as on nodes of one process each."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    command_line(words)


def command_line(words: list[str], changes: dict[int, list[str]] | None = None) -> None:
    """`ridgeline WORDS`, with more words on some ranks."""
    from ridgeline.cli.main import main

    raise SystemExit(main([*words, *(changes or {}).get(int(os.environ["RANK"]), [])]))
