"""Run every test marked gpu: groups in processes of their own, failures once more, each alone.

    python -m tests.run_gpu [--results FILE.json] [--seconds 480] [--workers N] [PATH...]

An error of the GPU (an illegal access) spoils every later call of its process. So the tests are
cut into small groups, several of which run at once; each case of a group that is not known to have
passed is run again in a process of its own with CUDA_LAUNCH_BLOCKING=1, where the error names the
launch that made it. A case that fails by a warning made an error (another PyTorch warns of other
things) is run a third time without that, and told apart. Most of the time is compilation, which the
processes share through Triton's cache on disk. Where a machine has several GPUs, --devices spreads
the processes over them.

The last lines are a table by file; --results keeps every case. Exit status 1 where a case failed,
was lost or not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
GOOD = ("passed", "skipped")
OUTCOMES = (*GOOD, "alone", "warning", "failed", "lost", "not run")
MEANING = """\
alone: failed beside others, passed alone; warning: right, but something warned; lost: its process
ended or ran out of time without a word; not run: the time was over"""
_WARNING = re.compile(r"^(?:\w+\.)*\w*Warning\b")


@dataclass(frozen=True, slots=True)
class Case:
    """One test and what became of it."""

    id: str
    outcome: str
    """One of OUTCOMES."""
    seconds: float = 0.0
    message: str = ""
    """The first line of what was raised, or why it was skipped."""

    @property
    def file(self) -> str:
        return self.id.split("::")[0]


@dataclass(frozen=True, slots=True)
class Job:
    """Cases for one process."""

    ids: tuple[str, ...]
    alone: bool = False
    """The second time: one case, launches that block."""
    warnings: bool = False
    """The third time: warnings are no errors."""


@dataclass(slots=True)
class Settings:
    """How to run."""

    root: Path = ROOT
    paths: tuple[str, ...] = ()
    workers: int = 8
    group: int = 8
    """Cases of one process at the most."""
    seconds: float = 480.0
    """For everything."""
    job_seconds: float = 150.0
    alone_seconds: float = 60.0
    pytest_args: tuple[str, ...] = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; each process gets one. Empty: what the caller sees."""
    free: Queue[str] = field(default_factory=Queue)
    """The devices of the processes that could start now."""

    def __post_init__(self) -> None:
        for number in range(self.workers if self.devices else 0):
            self.free.put(self.devices[number % len(self.devices)])


def marked_files(root: Path) -> list[str]:
    """Test files with a gpu mark: only these are imported."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [
        path.relative_to(root).as_posix()
        for path in found
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]


def pytest_command(settings: Settings, *args: str) -> list[str]:
    """pytest on gpu tests with the project's own filters."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "--tb=short"]
    return [*command, *settings.pytest_args, *args]


def collect(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """(ids of every gpu test, {file that cannot be imported: why})."""
    files = list(settings.paths) or marked_files(settings.root)
    command = pytest_command(
        settings, "--collect-only", "--continue-on-collection-errors", *files
    )  # fmt: skip
    environment = {**os.environ, **settings.environment}
    done = subprocess.run(
        command, cwd=settings.root, env=environment, capture_output=True, text=True
    )  # fmt: skip
    ids = [line for line in done.stdout.splitlines() if re.match(r"[\w/.-]+\.py::", line)]
    broken = {}
    blocks = re.split(r"^_+ ERROR collecting (\S+) _+$", done.stdout, flags=re.M)
    for name, text in zip(blocks[1::2], blocks[2::2], strict=True):
        said = re.findall(r"^E +(.+)$", text, re.M)
        broken[name] = said[-1] if said else "it cannot be imported"
    if not ids and not broken:
        raise SystemExit(f"no gpu test found:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ids, broken


def groups_of(ids: Sequence[str], size: int) -> list[Job]:
    """Groups of one test function each; those of few, therefore long, cases first and smaller."""
    by_function: dict[str, list[str]] = {}
    for case in ids:
        by_function.setdefault(case.split("[")[0], []).append(case)
    jobs = []
    for cases in sorted(by_function.values(), key=len):
        step = min(size, max(2, len(cases) // 8))
        jobs += [Job(tuple(cases[n : n + step])) for n in range(0, len(cases), step)]
    return jobs


def xml_key(case: str) -> tuple[str, str]:
    """How the JUnit report names a case: (class, name)."""
    path, *parts = case.split("[")[0].split("::")
    name = case[len(case.split("[")[0]) :]
    module = path.removesuffix(".py").replace("/", ".")
    return ".".join([module, *parts[:-1]]), parts[-1] + name


def read_report(path: Path, ids: Iterable[str]) -> dict[str, Case]:
    """Cases of a report; without the report none."""
    if not path.exists() or not path.stat().st_size:
        return {}
    names = {xml_key(case): case for case in ids}
    found = {}
    for node in ElementTree.parse(path).iter("testcase"):
        case = names.get((node.get("classname", ""), node.get("name", "")))
        if case is None:
            continue
        outcome, message = "passed", ""
        for child in node:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message = child.get("message", "")
        first = message.strip().splitlines()[0][:300] if message.strip() else ""
        found[case] = Case(case, outcome, float(node.get("time", 0)), first)
    return found


def run_job(settings: Settings, job: Job, deadline: float) -> dict[str, Case]:
    """What became of a job's cases; those that say nothing are lost."""
    limit = settings.alone_seconds if job.alone else settings.job_seconds
    limit = min(limit, deadline - time.monotonic())
    if limit < 1:
        return {case: Case(case, "not run") for case in job.ids}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        extra = ("-W", "default") if job.warnings else ()
        command = pytest_command(settings, f"--junitxml={report}", *extra, *job.ids)
        with _device(settings) as environment:
            environment |= {"CUDA_LAUNCH_BLOCKING": "1"} if job.alone else {}
            ended = _run(command, settings, limit, environment)
        found = read_report(report, job.ids)
    return {case: found.get(case, Case(case, "lost", limit, ended)) for case in job.ids}


@contextlib.contextmanager
def _device(settings: Settings) -> Iterator[dict[str, str]]:
    """The variables of a process that has one of the devices until it ends."""
    if not settings.devices:
        yield {}
        return
    device = settings.free.get()
    try:
        yield {"CUDA_VISIBLE_DEVICES": device}
    finally:
        settings.free.put(device)


def _run(
    command: Sequence[str], settings: Settings, limit: float, environment: dict[str, str]
) -> str:
    """Run a process group, at most so many seconds; how it ended, in words."""
    child = subprocess.Popen(
        command,
        cwd=settings.root,
        env={**os.environ, **settings.environment, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"killed after {limit:.0f} s"
    return f"ended with status {code}"


def again(job: Job, found: dict[str, Case]) -> list[Job]:
    """The jobs that the outcome of one asks for."""
    bad = [case for case in found.values() if case.outcome not in (*GOOD, "not run")]
    if not job.alone:
        return [Job((case.id,), alone=True) for case in bad]
    if not job.warnings and bad and _WARNING.match(bad[0].message):
        return [Job(job.ids, alone=True, warnings=True)]
    return []


def settle(job: Job, before: Case | None, now: Case) -> Case:
    """A case after another run of it."""
    if not job.alone or before is None:
        return now
    if now.outcome == "not run":
        return before
    if now.outcome != "passed":
        return now if not job.warnings else before
    outcome = "warning" if job.warnings else "alone"
    return Case(now.id, outcome, now.seconds, before.message)


def run_all(settings: Settings, ids: Sequence[str]) -> list[Case]:
    """Every case, in the order of ids."""
    deadline = time.monotonic() + settings.seconds
    results: dict[str, Case] = {}
    with ThreadPoolExecutor(settings.workers) as pool:

        def start(job: Job) -> None:
            waiting[pool.submit(run_job, settings, job, deadline)] = job

        waiting: dict[Future[dict[str, Case]], Job] = {}
        for job in groups_of(ids, settings.group):
            start(job)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                job, found = waiting.pop(future), future.result()
                for case in found.values():
                    results[case.id] = settle(job, results.get(case.id), case)
                for more in again(job, found):
                    start(more)
            counts = Counter(case.outcome for case in results.values())
            said = ", ".join(f"{count} {name}" for name, count in counts.items())
            print(f"{len(results)} of {len(ids)}: {said}", file=sys.stderr, flush=True)
    return [results[case] for case in ids]


def table(cases: Sequence[Case], broken: dict[str, str]) -> str:
    """By file; then what is not good, a line each."""
    files: dict[str, list[Case]] = {}
    for case in cases:
        files.setdefault(case.file, []).append(case)
    wide = max([len(name) for name in (*files, *broken)] + [4])
    lines = ["  ".join([f"{'file':<{wide}}", *(f"{name:>7}" for name in OUTCOMES), "seconds"])]
    for name, mine in files.items():
        counts = Counter(case.outcome for case in mine)
        cells = [f"{counts[outcome] or '.':>7}" for outcome in OUTCOMES]
        seconds = sum(case.seconds for case in mine)
        lines.append("  ".join([f"{name:<{wide}}", *cells, f"{seconds:7.0f}"]))
    lines += [f"{name:<{wide}}  not collected: {why}" for name, why in broken.items()]
    bad = [case for case in cases if case.outcome not in GOOD]
    lines += [f"{case.outcome:<8}{case.id}  {case.message}"[:230] for case in bad]
    return "\n".join([*lines, *([MEANING] if bad else [])])


def facts() -> dict[str, str]:
    """The machine and the versions that a summary is about."""
    found = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    for name in ("torch", "triton", "pytest"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found["gpu"] = found["gpu"].strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found["commit"] = commit.stdout.strip()
    return found


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="run_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files or ids; every marked file unless given")
    parser.add_argument("--results", type=Path, help="a JSON file for every case")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--group", type=int, default=8, help="cases of one process at the most")
    parser.add_argument("--devices", default="", help="GPUs to share out, as in 0,1,2,3")
    flags = parser.parse_args(words)
    settings = Settings(
        devices=tuple(flags.devices.split(",")) if flags.devices else (),
        paths=tuple(flags.paths),
        workers=flags.workers,
        group=flags.group,
        seconds=flags.seconds,
    )
    start = time.monotonic()
    ids, broken = collect(settings)
    settings.seconds -= time.monotonic() - start
    cases = run_all(settings, ids)
    seconds = round(time.monotonic() - start, 1)
    if flags.results is not None:
        summary = {**facts(), "seconds": seconds, "not_collected": broken}
        summary["counts"] = dict(Counter(case.outcome for case in cases))
        summary["cases"] = [asdict(case) for case in cases]
        flags.results.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(table(cases, broken))
    print(f"{len(cases)} cases in {seconds} s")
    return int(bool(broken) or any(case.outcome not in GOOD for case in cases))


if __name__ == "__main__":
    sys.exit(main())
