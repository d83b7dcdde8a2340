"""What a run measures, and where it goes: metrics.jsonl, the progress bar's note, TensorBoard.

Model FLOPs of a token are 6 N + 12 L H D T (N: parameters that tokens are multiplied with, the head
included, the lookup not). Non-causal counts T = the sample's length for every token; causal counts
the keys that the mask, windows and document boundaries leave. MFU divides by the named peak. The
first convention is that of most published figures, the second is the work that is done.
Source of the counting: PaLM (arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ridgeline.core import arch, progress
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_write_text
from ridgeline.nn.config import DecoderConfig
from ridgeline.train.config import LogConfig

FILE = "metrics.jsonl"
HOPPER_DATASHEET_TFLOPS = 989.0
"""Dense 16-bit rate of an H100 SXM and an H200, NVIDIA's datasheets."""


def step_flops(
    model: DecoderConfig, seqlens: Iterable[int], sample_tokens: int, *, causal: bool
) -> float:
    """Model FLOPs, forward and backward, of packed sequences of these lengths.

    causal: count the keys that each token sees; else `sample_tokens` keys a token.
    """
    counts = Counter(seqlens)
    if causal:
        return sum(
            count * length * model.flops_per_token(length, causal=True)
            for length, count in counts.items()
        )
    tokens = sum(count * length for length, count in counts.items())
    return tokens * model.flops_per_token(sample_tokens, causal=False)


def peak_of(device: torch.device, dtype: str, override_tflops: float | None) -> tuple[float, str]:
    """What MFU divides by: (TFLOP/s, where the number is from)."""
    if override_tflops is not None:
        return override_tflops, "log.peak_tflops"
    found = arch.detect(device)
    ceilings = found.ceilings
    where = f"on {found.device} (not measured here; {ceilings.source})"
    if ceilings.measured:
        where = ceilings.source  # it names the device
    return ceilings.tflops(dtype), f"{dtype} matmul, {where}"


def peak_note(device: torch.device, dtype: str, peak_tflops: float) -> str:
    """How MFU over a peak reads beside published figures, which divide by the datasheet; empty
    where there is no other figure."""
    name = arch.detect(device).device if device.type == "cuda" else ""
    if dtype not in ("bfloat16", "float16") or not any(x in name for x in ("H100", "H200")):
        return ""
    if peak_tflops == HOPPER_DATASHEET_TFLOPS:
        return "; the datasheet's rate, as published figures have it"
    share = peak_tflops / HOPPER_DATASHEET_TFLOPS
    return (
        f"; published figures divide by the datasheet's {HOPPER_DATASHEET_TFLOPS:g}: "
        f"this one times {share:.2f} (log.peak_tflops)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on the GPU, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (own := _high_water_kib()) is not None:
        return own * 1024
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024  # KiB on Linux, bytes on macOS


def _high_water_kib() -> int | None:
    """Linux's own account: ru_maxrss of a started process begins at its parent's."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl, a line that was cut by a crash left out."""
    try:
        lines = (run_dir / FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def require_tensorboard() -> Any:
    """The class that writes TensorBoard events.

    Raises: UserError where the package is missing.
    """
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise UserError(
            "train: log.tensorboard needs the tensorboard package, which is not installed; "
            "pip install tensorboard"
        ) from error
    return SummaryWriter


class MetricsLog:
    """Rows of a run, each step once: what an earlier process wrote past the resumed step goes.

    silent: rows are made and not written (a rank that is not the first).
    """

    def __init__(
        self, run_dir: Path, config: LogConfig, resumed_step: int, *, silent: bool = False
    ) -> None:
        self._writer, self._file = None, None
        if silent:
            return
        if config.tensorboard:
            writer = require_tensorboard()
            self._writer = writer(str(run_dir / "tensorboard"), purge_step=resumed_step + 1)
        kept = [row for row in read_rows(run_dir) if row["step"] <= resumed_step]
        if resumed_step == 0:
            kept = []
        atomic_write_text(run_dir / FILE, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(run_dir / FILE, "a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append a row; also an event for a machine that listens."""
        row = {"kind": kind, "step": step, **values}
        if self._file is None:
            return row
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"train: could not write {FILE}: {error.strerror or error}") from error
        progress.event(kind, **{key: value for key, value in row.items() if key != "kind"})
        if self._writer is not None:
            for name, value in _flat(values):
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
        return row

    def close(self) -> None:
        """Close the files; rows that the disk refused were reported when they were written."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._writer is not None:
            self._writer.close()


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested values as "step_ms/compute"."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


class Meter:
    """Tokens, FLOPs and seconds of training steps since the last reading, of all ranks together;
    MFU is over the sum of their peaks."""

    def __init__(
        self, model: DecoderConfig, sample_tokens: int, peak_tflops: float, ranks: int = 1
    ) -> None:
        self._model, self._sample_tokens, self._peak = model, sample_tokens, peak_tflops
        self._ranks = ranks
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._steps = 0
        self._seconds = self._causal = self._noncausal = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self, seqlens: list[int]) -> None:
        """A step of sequences of these lengths is done."""
        assert self._started is not None
        self._seconds += time.perf_counter() - self._started
        self._steps += 1
        self._tokens += sum(seqlens)
        self._causal += step_flops(self._model, seqlens, self._sample_tokens, causal=True)
        self._noncausal += step_flops(self._model, seqlens, self._sample_tokens, causal=False)

    def read(self) -> dict[str, float]:
        """Rates since the last reading, which starts a new interval; {} where no step was timed."""
        if self._steps == 0:
            return {}
        seconds = max(self._seconds, 1e-9)
        peak = self._peak * 1e12 * self._ranks
        rates = {
            "step_s": seconds / self._steps,
            "tokens_per_s": self._tokens / seconds,
            "tokens_per_s_per_gpu": self._tokens / seconds / self._ranks,
            "mfu_causal": self._causal / seconds / peak,
            "mfu_noncausal": self._noncausal / seconds / peak,
        }
        self._reset()
        return rates
