"""Compile on a machine without a GPU every Hopper kernel that tests and measurements ask for there.

    python -m tests.export_kernels --cache FOLDER [--have FOLDER...] [--check] [WHAT...]

WHAT is what tests/pretended_hopper.py takes (GPU tests, groups of verify_hopper.py, `bench`) or a
list that it wrote; without it EVERYTHING. A process that takes itself for one on an H200 says which
kernels are wanted. What the folder (a RIDGELINE_CACHE) does not have is then taken from a folder
that has a kernel of that name (--have; that it is of the same sources is yours to know) or
compiled, one after the other, a line each. The same command goes on where it was stopped, and a
second one beside it, with --reverse, starts from the end. --check then reads the machine code of
all of them (tests/hopper_code.py). Needs the DSL and a linker. A Hopper GPU without the DSL runs on
a copy of the folder with the DSL's runtime library in its `cute` (docs/w4a16.md). Exit status 1
where a kernel failed, or a test ended before it had asked for all.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.files import atomic_path
from ridgeline.kernels.attention import (
    cute_sm90_backward_config,
    cute_sm90_cached_config,
    cute_sm90_config,
    cute_sm90_roles_config,
)
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.w4a16 import cute_cache, tiles, tiles_stream, tiles_trimmed
from tests import hopper_code

ROOT = Path(__file__).parents[1]
GROUPS = (
    "packed_wide", "used_backward", "narrow", "capture", "public", "used", "packed", "parts",
    "pages", "again", "deterministic", "turned_windows", "windows", "pair", "single", "softcap",
    "helpers", "far", "repeats", "tail", "tail_repeats", "tail_tune",
)  # fmt: skip
TESTS = (
    "tests/kernels/attention/test_cute_sm90_gpu.py",
    "tests/kernels/w4a16/test_hopper.py",
    "tests/quant/test_greedy.py",
)
EVERYTHING = (*GROUPS, "bench", *TESTS)


_RECORDS = (
    cute_sm90_config, cute_sm90_backward_config, cute_sm90_cached_config, cute_sm90_roles_config,
    tiles, tiles_stream, tiles_trimmed,
)  # fmt: skip
_COMPILERS = {
    "attention": "ridgeline.kernels.attention.cute.library",
    "w4a16": "ridgeline.kernels.w4a16.cute_library",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel that was asked for."""

    op: str
    key: tuple[Any, ...]
    path: Path
    """Where the cache keeps it."""


def asked_by(what: Sequence[str]) -> tuple[list[Any], list[str]]:
    """(kernels as JSON, what ended early) of tests, groups and cells on a pretended H200, or of a
    list made of them before."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.json"
        if len(what) == 1 and what[0].endswith(".json"):
            target = Path(what[0])
        else:
            command = [sys.executable, "-O", "-m", "tests.pretended_hopper", str(target), *what]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if not target.exists():
                raise SystemExit(f"export_kernels: nothing was noted:\n{done.stderr[-3000:]}")
        found = json.loads(target.read_text(encoding="utf-8"))
    return found["kernels"], found["early"]


def wanted(kernel: Sequence[Any]) -> Wanted:
    """A kernel of the list as our own records."""
    op, *records = kernel
    key = tuple(_record(name, fields) for name, fields in records)
    if op == "attention":
        return Wanted(op, key, cache.kernel_path(*key))
    return Wanted(op, key, cute_cache.cache_folder() / f"{cute_cache.kernel_name(*key)}.so")


def _record(name: str, fields: dict[str, Any]) -> Any:
    kind = next(getattr(place, name) for place in _RECORDS if hasattr(place, name))
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()})


def copy_known(kernels: Iterable[Wanted], folders: Iterable[Path]) -> int:
    """Copy what other folders have by name; how many."""
    known = {file.stem: file for folder in folders for file in folder.rglob("*.so")}
    count = 0
    for kernel in kernels:
        if not kernel.path.exists() and kernel.path.stem in known:
            with atomic_path(kernel.path) as part:
                shutil.copyfile(known[kernel.path.stem], part)
            count += 1
    return count


def taken(kernel: Wanted) -> bool:
    """Whether another process is compiling it right now."""
    kernel.path.parent.mkdir(parents=True, exist_ok=True)
    with open(kernel.path.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def compile_all(kernels: Sequence[Wanted]) -> list[str]:
    """Compile what is missing, a line each; the names of those that failed."""
    failed = []
    for number, kernel in enumerate(kernels, 1):
        if kernel.path.exists() or taken(kernel):
            continue
        start = time.monotonic()
        try:
            importlib.import_module(_COMPILERS[kernel.op]).compile_kernel(*kernel.key)
            said = f"{time.monotonic() - start:.1f} s"
        except Exception as error:  # noqa: BLE001  the others are wanted all the same
            failed.append(kernel.path.stem)
            said = f"failed: {type(error).__name__}: {str(error)[:200]}"
        print(f"{number} of {len(kernels)} {kernel.path.stem} {said}", flush=True)
    return failed


def check_all(kernels: Iterable[Wanted]) -> list[str]:
    """The names of those whose machine code is not what it must be, a line each."""
    wrong = []
    for kernel in kernels:
        try:
            hopper_code.check(hopper_code.code_of(kernel.path), *kernel.key)
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            print(f"machine code of {kernel.path.stem}: {line} {error}", flush=True)
            wrong.append(kernel.path.stem)
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="export_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="tests, groups of verify_hopper.py, bench[:REGEX]")
    parser.add_argument("--cache", type=Path, help="a RIDGELINE_CACHE; default: the user's")
    parser.add_argument("--have", type=Path, nargs="*", default=[], help="folders of kernels")
    parser.add_argument("--reverse", action="store_true", help="from the end")
    parser.add_argument("--check", action="store_true", help="read the machine code of all")
    flags = parser.parse_args(words)
    if flags.cache is not None:
        os.environ["RIDGELINE_CACHE"] = str(flags.cache.resolve())
    asked, early = asked_by(flags.what or EVERYTHING)
    kernels = [wanted(kernel) for kernel in asked]
    copied = copy_known(kernels, flags.have)
    missing = [kernel for kernel in kernels if not kernel.path.exists()]
    print(f"{len(kernels)} kernels, {copied} copied, {len(missing)} to compile", flush=True)
    for line in early:
        print(f"ended early: {line}", flush=True)
    failed = compile_all(missing[::-1] if flags.reverse else missing)
    left = [kernel.path.stem for kernel in kernels if not kernel.path.exists()]
    wrong = check_all(k for k in kernels if k.path.exists()) if flags.check else []
    found = {"left": left, "failed": failed, "wrong": wrong, "early": early}
    print(json.dumps({"kernels": len(kernels), **found}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
