"""Progress of anything over two seconds: a rich bar on stderr, lines, or JSON for machines.

One reporter a process, chosen by the command line: `bars` (a terminal), `lines` (stderr is no
terminal: a line every few seconds), `json` (an event a line on stdout), `quiet` (a library call).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Advance(Protocol):
    """Call to move a bar: advance(3), or advance(0, note="loss 2.31")."""

    def __call__(self, amount: float = 1, *, note: str = "") -> None: ...


_mode = "quiet"
_LINE_EVERY_S = 5.0


def set_mode(mode: str) -> None:
    """Choose the reporter: bars, lines, json or quiet."""
    global _mode
    assert mode in ("bars", "lines", "json", "quiet"), mode
    _mode = mode


def mode() -> str:
    """The reporter in force."""
    return _mode


def event(kind: str, **fields: Any) -> None:
    """Tell a machine: one JSON object a line on stdout in json mode, nothing otherwise."""
    if _mode == "json":
        print(json.dumps({"event": kind, **fields}, default=str), flush=True)


def say(text: str) -> None:
    """Tell a person: a line on stdout in bars and lines mode."""
    if _mode in ("bars", "lines"):
        print(text, flush=True)


@contextlib.contextmanager
def task(name: str, total: float | None, unit: str = "") -> Iterator[Advance]:
    """A piece of work with `total` units (None: unknown); yields the function that advances it."""
    if _mode == "bars":
        with _rich_task(name, total, unit) as advance:
            yield advance
    elif _mode in ("lines", "json"):
        yield _line_task(name, total, unit)
    else:
        yield lambda amount=1, *, note="": None


@contextlib.contextmanager
def _rich_task(name: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        handle = bar.add_task(name, total=total, note="")

        def advance(amount: float = 1, *, note: str = "") -> None:
            bar.update(handle, advance=amount)
            if note:
                bar.update(handle, note=note)

        yield advance


def _line_task(name: str, total: float | None, unit: str) -> Advance:
    state = {"done": 0.0, "start": time.monotonic(), "last": time.monotonic()}

    def advance(amount: float = 1, *, note: str = "") -> None:
        state["done"] += amount
        now = time.monotonic()
        finished = total is not None and state["done"] >= total
        if now - state["last"] < _LINE_EVERY_S and not finished:
            return
        state["last"] = now
        elapsed = now - state["start"]
        if _mode == "json":
            event(
                "progress",
                task=name,
                done=state["done"],
                total=total,
                unit=unit,
                note=note,
                elapsed_s=round(elapsed, 2),
            )
        elif elapsed > 2.0 or finished:
            print(
                f"{name}: {_amount(state['done'], total, unit)} {elapsed:.0f} s {note}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    return advance


def _amount(done: float, total: float | None, unit: str) -> str:
    """What is done of what, bytes as megabytes."""
    scale, digits, unit = (1e6, ".1f", "MB") if unit == "bytes" else (1.0, "g", unit)
    of = "" if total is None else f" of {total / scale:{digits}}"
    return f"{done / scale:{digits}}{of} {unit}"


def quiet_during(function: Callable[[], Any]) -> Any:
    """Run a function with the reporter silent (warm-ups, measurements)."""
    before = _mode
    set_mode("quiet")
    try:
        return function()
    finally:
        set_mode(before)
