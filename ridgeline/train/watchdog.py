"""A run of several ranks that stands still is ended with a report of who waits for whom.

Each rank's watchdog thread looks at its own last sign of progress. When that is too old it writes
<run>/hang/rank-00003.json (rank, host, step, what it did, collectives under way from PyTorch's
flight recorder, the Python stack); the lowest rank that could do so then says in one message which
ranks are behind, and every rank ends with exit code 1. A rank that gave no report is stopped,
killed or cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch._C._distributed_c10d as c10d

from ridgeline.train.ranks import SAVE_GROUP, Ranks

EXIT_CODE = 1
_GRACE_S = 3.0
"""How long the first rank that notices waits for the others' reports, besides a tenth of the
timeout."""


class Watchdog:
    """Entered around the loop; `beat` is a sign of progress. Does nothing for one process."""

    def __init__(self, run_dir: Path, ranks: Ranks, timeout_s: float) -> None:
        self._folder, self._ranks, self._timeout_s = run_dir / "hang", ranks, timeout_s
        self._done = threading.Event()
        self._main = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._last = (time.monotonic(), 0, "start")

    def beat(self, step: int, doing: str) -> None:
        """Progress: this step, this phase."""
        self._last = (time.monotonic(), step, doing)

    def __enter__(self) -> Watchdog:
        self.beat(self._last[1], self._last[2])
        if self._ranks.size > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._timeout_s / 4)):
            since, _, _ = self._last
            if time.monotonic() - since > self._timeout_s:
                break
        else:
            return
        try:
            self._report()
        finally:
            sys.stderr.flush()
            os._exit(EXIT_CODE)  # the main thread waits in a collective that will not end

    def _report(self) -> None:
        since, step, doing = self._last
        report = {
            "rank": self._ranks.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": step,
            "doing": doing,
            "seconds": round(time.monotonic() - since, 1),
            "collectives": last_collectives(),
            "stack": self._stack(),
        }
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"rank-{self._ranks.rank:05d}.json"
        path.with_suffix(".tmp").write_text(json.dumps(report, indent=1), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)
        deadline = time.monotonic() + _GRACE_S + self._timeout_s / 10
        while time.monotonic() < deadline:
            if len(list(self._folder.glob("rank-*.json"))) == self._ranks.size:
                break
            time.sleep(0.1)
        reports = _read_reports(self._folder)
        if min(reports, default=None) == self._ranks.rank:
            text = told(reports, self._ranks.size, self._timeout_s, self._folder)
            print(f"ridgeline: {text}", file=sys.stderr, flush=True)
            time.sleep(0.5)  # torchrun ends all ranks when the first one ends

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main.ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else []
        return [" ".join(line.split()) for line in lines[-12:]]


def last_collectives(count: int = 8) -> list[dict[str, Any]]:
    """This process's last collectives from PyTorch's flight recorder, oldest first: those under way
    and the last others, a checkpoint's beside the training left out where they are finished."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's recorder and NCCL's
        if (dump := getattr(c10d, name, None)) is not None:
            with contextlib.suppress(RuntimeError, ValueError, TypeError):
                found = json.loads(dump(includeCollectives=True, onlyActive=False))
                entries += found.get("entries", [])
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    made = [
        {
            "name": entry.get("profiling_name", "?"),
            "number": entry.get("collective_seq_id", entry.get("p2p_seq_id", 0)),
            "group": " ".join(map(str, entry.get("process_group", ()))),
            "sizes": entry.get("input_sizes", []),
            "finished": bool(entry.get("retired", False)) or entry.get("state") == "completed",
        }
        for entry in entries
    ]
    mine = [each for each in made if not each["finished"] or SAVE_GROUP not in each["group"]]
    last = len(mine) - count
    return [each for place, each in enumerate(mine) if place >= last or not each["finished"]]


def _read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        found[report["rank"]] = report
    return found


def told(reports: dict[int, dict[str, Any]], size: int, timeout_s: float, folder: Path) -> str:
    """The ranks' reports for people: who is behind, and what each one did last."""
    behind = behind_of(reports, size)
    lines = [
        f"train: no progress for {timeout_s:g} s; behind: {', '.join(f'rank {r}' for r in behind)}"
    ]
    for rank in range(size):
        if rank not in reports:
            lines.append(f"  rank {rank}: gave no report; it is stopped, killed or cut off")
            continue
        report = reports[rank]
        made = report["collectives"]
        waiting = [each for each in made if not each["finished"]]
        last = (waiting or made or [None])[-1]
        where = "no collective yet"
        if last is not None:
            state = "waits in" if waiting else "last finished"
            where = f"{state} {last['name']} {last['number']} of group {last['group']}"
        lines.append(
            f"  rank {rank} ({report['host']} pid {report['pid']}): {report['doing']} of step "
            f"{report['step']} for {report['seconds']:g} s, {where}"
        )
    return "\n".join([*lines, f"  stacks and more: {folder}"])


def behind_of(reports: dict[int, dict[str, Any]], size: int) -> list[int]:
    """The ranks that the others wait for: silent ones, else those at the earliest step, and of them
    those that wait in no collective, if only some do."""
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        return silent
    earliest = min(report["step"] for report in reports.values())
    slow = [rank for rank in sorted(reports) if reports[rank]["step"] == earliest]
    idle = [r for r in slow if all(each["finished"] for each in reports[r]["collectives"])]
    return idle or slow
