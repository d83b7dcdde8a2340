"""A rank that rank 0 started: `python -m ridgeline.engine.tp_worker`, its order on standard input
(workers.py). Ends when rank 0 says stop, or when its standard input closes: rank 0 is gone then."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch

from ridgeline.core import progress
from ridgeline.engine import tp
from ridgeline.engine.follow import Follower
from ridgeline.engine.llm import LLM
from ridgeline.engine.workers import END_S, LocalGroup, config_of, read_order

GONE = 3
"""Exit status when rank 0 is gone."""


def main() -> int:
    """Run one rank; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    progress.set_mode("quiet")
    order = read_order(0)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    rank, meeting = int(order["rank"]), Path(order["meeting"])

    def say(word: str, text: str = "") -> None:
        written = meeting / f".{word}.{rank}"
        written.write_text(text, encoding="utf-8")
        written.rename(meeting / f"{word}.{rank}")

    try:
        device = torch.device(order["device"])
        if device.type == "cpu":
            torch.set_num_threads(int(order["threads"]))
        config = config_of(order["config"])
        say("started")
        tp.join(rank, config.tensor_parallel, meeting / "meeting", device)
        own = tp.on_rank(device, rank)
        group = LocalGroup(rank, config.tensor_parallel, own, say)
        llm = LLM(Path(order["folder"]), config, group=group)
        Follower(llm).run()
        llm.close()
        tp.leave(END_S)
    except Exception as error:
        traceback.print_exc()
        if meeting.is_dir():
            say("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_rank_0() -> None:
    while os.read(0, 4096):
        pass
    os._exit(GONE)  # a collective may wait for rank 0 for ever


if __name__ == "__main__":
    sys.exit(main())
