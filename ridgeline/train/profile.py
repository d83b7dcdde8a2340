"""Where a step's time goes, from PyTorch's profiler: compute, exposed communication, bubble.

    compute       some kernel (on a CPU: an aten operator) that is no communication runs
    bubble        none does, but a send or receive between pipeline stages is under way
    exposed_comm  neither, but a collective is under way
    data          making batches on the host;  other: the rest (the host, launches, the optimizer's
                  gaps)

Communication behind compute costs nothing and is not counted. A rank that waits in a collective
for a slower one counts as exposed communication, in a receive as bubble. Profiling slows a step, so
only a few are profiled and their rates are not logged as the run's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ridgeline.core import env
from ridgeline.core.errors import UserError
from ridgeline.train.config import LogConfig
from ridgeline.train.ranks import Ranks

Interval = tuple[float, float]

PARTS = ("compute", "exposed_comm", "bubble", "data", "other")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time that intervals cover together."""
    return sum(end - start for start, end in union(intervals))


def split(events: Iterable[tuple[str, bool, float, float]]) -> dict[str, float]:
    """Seconds of compute, exposed communication and bubble in profiler events.

    events: (name, runs on a GPU, start, end), times in microseconds. Where there are GPU events the
    host's do not count.
    """
    listed = list(events)
    if any(on_gpu for _, on_gpu, _, _ in listed):
        listed = [event for event in listed if event[1]]
    compute: list[Interval] = []
    pipeline: list[Interval] = []
    collectives: list[Interval] = []
    for name, on_gpu, start, end in listed:
        low = name.lower()
        if low.startswith("gloo:") or (on_gpu and low.startswith("nccl")):
            between_stages = any(word in low for word in ("send", "recv"))
            (pipeline if between_stages else collectives).append((start, end))
        elif (on_gpu and not low.startswith(("memcpy", "memset"))) or low.startswith("aten::"):
            compute.append((start, end))
    busy = length(compute)
    with_pipeline = length(compute + pipeline)
    everything = length(compute + pipeline + collectives)
    return {
        "compute": busy * 1e-6,
        "bubble": (with_pipeline - busy) * 1e-6,
        "exposed_comm": (everything - with_pipeline) * 1e-6,
    }


def shares(step_ms: dict[str, float]) -> str:
    """A split for people: "compute 80% exposed comm 12% ..."."""
    whole = max(sum(step_ms.values()), 1e-9)
    return " ".join(
        f"{name.replace('_', ' ')} {100 * ms / whole:.0f}%" for name, ms in step_ms.items()
    )


class StepProfiler:
    """Profiles the steps that the config asks for."""

    def __init__(self, config: LogConfig, run_dir: Path, ranks: Ranks) -> None:
        env.quiet_profiler()
        self._config, self._folder, self._ranks = config, run_dir / "profile", ranks
        self.step_ms: dict[str, float] | None = None
        """Of the profiled step since it was last taken, mean over ranks, milliseconds."""

    def due(self, step: int) -> bool:
        """Whether a step (the first is 1) is profiled."""
        every = self._config.breakdown_every_steps
        split_due = self._ranks.size > 1 and every > 0 and (step - 2) % every == 0 and step > 1
        return split_due or step == self._config.profile_step

    @contextlib.contextmanager
    def profiled(self, step: int, device: torch.device) -> Iterator[None]:
        """Profile what is done inside."""
        kinds = [ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        wanted = step == self._config.profile_step
        # One cycle only; without acc_events PyTorch 2.11 warns that others' events are not kept.
        with profile(activities=kinds, record_shapes=wanted, acc_events=True) as found:
            yield
        # The raw records: building PyTorch's event tree out of them takes seconds.
        assert found.profiler is not None and found.profiler.kineto_results is not None
        self._events = [
            (
                record.name(),
                record.device_type() == DeviceType.CUDA,
                record.start_ns() / 1e3,
                record.end_ns() / 1e3,
            )
            for record in found.profiler.kineto_results.events()
            # A name put around kernels is no kernel; on the host gloo's work is such a name.
            if not (record.device_type() == DeviceType.CUDA and record.is_user_annotation())
        ]
        if step == self._config.profile_step:
            self._write(found, step)

    def _write(self, found: Any, step: int) -> None:
        path = self._folder / f"step-{step}-rank-{self._ranks.rank:05d}.json"
        try:
            self._folder.mkdir(exist_ok=True)
            found.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"train: could not write {path}: {error}; free the disk") from error

    def finish(self, seconds: float, data_seconds: float) -> None:
        """Turn the profiled step into its split; a collective call."""
        own = split(self._events)
        own["data"] = data_seconds
        own["other"] = max(0.0, seconds - sum(own.values()))
        values = torch.tensor([own[part] * 1e3 for part in PARTS], dtype=torch.float64)
        if self._ranks.talk is not None:
            dist.all_reduce(values, group=self._ranks.talk)
            values /= self._ranks.size
        self.step_ms = dict(zip(PARTS, values.tolist(), strict=True))
        self._events = []

    def take(self) -> dict[str, float] | None:
        """The split of the last profiled step, once."""
        found, self.step_ms = self.step_ms, None
        return found
