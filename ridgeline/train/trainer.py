"""The training loop: `train(config)` from text files to a Hugging Face folder, on one process or
many.

    for each step:   indices = order(consumed)            one integer, no loader state
                     n = valid targets of the global batch, counted from offsets
                     for each micro-batch: backward(sum of token losses / n)
                     clip by the global norm; AdamW at the step's learning rate
    now and then:    a row of metrics, an evaluation, a checkpoint

A step's result depends on (state, config, consumed) alone, so a run that was interrupted anywhere
and resumed equals one that was not, bitwise on a CPU with the same number of threads and the same
layout; under another layout it goes on with the same state and the same samples.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ridgeline
from ridgeline.core import progress
from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import UserError, bad_value, common
from ridgeline.parallel.checkpoint import Record, Saver, scan
from ridgeline.train.checkpoint import run_lock, run_state
from ridgeline.train.config import (
    TrainConfig,
    config_hash,
    identity,
    identity_hash,
    require_files,
    to_dict,
)
from ridgeline.train.export import export
from ridgeline.train.metrics import (
    Meter,
    MetricsLog,
    peak_memory_bytes,
    peak_note,
    peak_of,
    require_tensorboard,
)
from ridgeline.train.optim import learning_rate
from ridgeline.train.order import sample_order
from ridgeline.train.profile import StepProfiler, shares
from ridgeline.train.ranks import open_ranks, told_once
from ridgeline.train.start import Start, choose_device, export_folder, prepare
from ridgeline.train.stop import StopRequest
from ridgeline.train.toml import to_toml
from ridgeline.train.watchdog import Watchdog

_SAVE_FAILED = 1000
"""Above all numbers of signals."""

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a call of `train` did."""

    run_dir: Path
    step: int
    """Steps done in all."""
    steps: int
    """Steps asked for."""
    consumed_samples: int
    resumed_from: int | None
    """Step of the checkpoint that it went on from."""
    interrupted: str | None
    """SIGINT, SIGTERM or stop_at_step; None: it reached the last step."""
    losses: tuple[float, ...]
    """Losses of the steps that this call logged, natural log per token."""
    eval_loss: float | None
    """Loss on the evaluation samples after the last step."""
    ranks: int
    """Processes."""
    tokens_per_s: float
    """Of the last logged interval, all processes together."""
    mfu_causal: float
    mfu_noncausal: float
    checkpoint: Path | None
    """The newest checkpoint."""
    exported: Path | None
    """The Hugging Face folder."""


def train(
    config: TrainConfig,
    *,
    on_step: OnStep | None = None,
    stop_at_step: int | None = None,
    print_config: bool = False,
) -> TrainResult:
    """Train a decoder as a config says, going on from the run folder's newest good checkpoint.

    on_step is called with each logged row. stop_at_step stops there as an interrupt would: state is
    saved, the schedule still ends at config.steps. print_config: say all of it at the start, not
    only its hash and where it is kept.
    Raises: ValueError for a config that cannot be, UserError for files, disk and diverged training.
    """
    with told_once():
        require_files(config)
        if stop_at_step is not None and stop_at_step < 1:
            raise bad_value("train", "stop_at_step", "be at least 1", stop_at_step, "leave it out")
        device = choose_device(config.device)
        if config.log.tensorboard:
            require_tensorboard()
    with open_ranks(config, device) as ranks, ExitStack() as held:
        if device.type == "cuda" and ranks.size > 1:
            device = torch.device("cuda", torch.cuda.current_device())
        ranks.first(lambda: held.enter_context(run_lock(config.run_dir)))
        run = _Run(prepare(config, device, ranks), on_step, print_config)
        held.callback(run.close)
        return run.run(min(config.steps, stop_at_step or config.steps))


class _Run:
    """A run in progress."""

    def __init__(self, start: Start, on_step: OnStep | None, print_config: bool) -> None:
        self.config, self.device, self.ranks = start.config, start.device, start.ranks
        self.data, self.tokenizer, self.worker = start.data, start.tokenizer, start.worker
        self.on_step = on_step if self.ranks.is_first else None
        self.print_config = print_config
        self.step, self.consumed = start.step, start.consumed_samples
        self.resumed_from = start.resumed_from
        self.saved_step = self.resumed_from
        self.losses: list[float] = []
        self.eval_loss: float | None = None
        self.rates = {"tokens_per_s": 0.0, "mfu_causal": 0.0, "mfu_noncausal": 0.0}
        config = self.config
        peak, source = peak_of(self.device, config.dtype, config.log.peak_tflops)
        self.peak_tflops = peak
        self.peak_source = source + peak_note(self.device, config.dtype, peak)
        self.meter = Meter(self.worker.shape, config.data.seqlen, peak, self.ranks.size)
        self.log = MetricsLog(config.run_dir, config.log, self.step, silent=not self.ranks.is_first)
        self.profiler = StepProfiler(config.log, config.run_dir, self.ranks)
        self.watchdog = Watchdog(config.run_dir, self.ranks, config.timeout_s)
        self.saver = Saver(
            config.run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            group=self.ranks.save,
        )
        # Not finite once a loss or a gradient was not; kept on the device, asked when a row is due.
        self._health = torch.zeros((), device=self.device)

    def run(self, last_step: int) -> TrainResult:
        """All steps up to `last_step`, then what the end asks for."""
        self._announce()
        steps, reason = self.config.steps, None
        with (
            StopRequest(alone=self.ranks.size == 1) as stop,
            progress.task("train", steps, "steps") as advance,
            self.watchdog,
        ):
            advance(self.step)
            while self.step < last_step and (reason := self._stopped(stop)) is None:
                if not self._train_step(stop):
                    continue
                advance(1, note=self._after_step())
            interrupted = reason or ("stop_at_step" if self.step < steps else None)
            if interrupted is None and self.eval_loss is None:
                self._evaluate()
            if self.saved_step != self.step:
                self._save()
            self._wait_for_save()
            exported = self._export() if interrupted is None else None
        return self._result(interrupted, exported)

    def _stopped(self, stop: StopRequest) -> str | None:
        """Why to stop, the same on every rank: a signal, or the end of a failed save, may reach
        them in different steps.

        Raises: UserError on every rank for a save that failed.
        """
        agreed = self.ranks.any_of(_SAVE_FAILED if self.saver.failed else stop.number)
        if agreed == _SAVE_FAILED:
            self._wait_for_save()
        return stop.named(agreed)

    def close(self) -> None:
        """End what outlives an error. Of several ranks one may be gone: its part of a save under
        way will never come."""
        if self.ranks.size == 1:
            with suppress(BaseException):
                self.saver.wait()
        self.log.close()

    def _announce(self) -> None:
        config, parameters = self.config, self.worker.shape.num_params()
        where = f"resuming at step {self.step}" if self.resumed_from is not None else "from step 0"
        size = self.ranks.size
        over = f" x {size} ({config.layout.describe()})" if size > 1 else ""
        if not self.ranks.is_first:
            return
        whole = f":\n{textwrap.indent(to_toml(config), '  ')}" if self.print_config else ""
        kept = f" in {config.run_dir / 'config.toml'}, {size} process{'es' * (size > 1)}"
        progress.say(f"config {config_hash(config)}{kept}{whole}")
        progress.say(
            f"train {parameters / 1e6:.2f} M parameters on {self.device.type}{over} in "
            f"{config.dtype}, {where} of {config.steps}; {self.data.train.num_samples} samples of "
            f"{config.data.seqlen} tokens; MFU over {self.peak_tflops:g} TFLOP/s a "
            f"{'GPU' if self.device.type == 'cuda' else 'process'}: {self.peak_source}"
        )
        self.log.write(
            "run",
            self.step,
            parameters=parameters,
            device=str(self.device),
            dtype=config.dtype,
            layout=config.layout.describe(),
            ranks=size,
            train_samples=self.data.train.num_samples,
            train_tokens=self.data.train.num_tokens,
            peak_tflops=self.peak_tflops,
            peak_source=self.peak_source,
            config_hash=config_hash(config),
            versions={"ridgeline": ridgeline.__version__, "torch": torch.__version__},
        )

    # ---- one step ------------------------------------------------------------------------------

    def _train_step(self, stop: StopRequest) -> bool:
        """One optimizer step; False where it was abandoned for a stop, with nothing changed."""
        number = self.step + 1
        self.watchdog.beat(number, "training")
        indices = self.data.order(self.consumed, self.config.batch_samples)
        self._due_row = number % self.config.log.every_steps == 0 or number == self.config.steps
        due = self._due_row or self._due_eval(number) or self._due_save(number)
        if self.profiler.due(number):
            self._wait()
            start, self.worker.data_seconds = time.perf_counter(), 0.0
            with self.profiler.profiled(number, self.device):
                done = self._compute(indices, stop)
                self._wait()
                seconds = time.perf_counter() - start
            if done:
                self.profiler.finish(seconds, self.worker.data_seconds)
        else:
            self.meter.start()
            done = self._compute(indices, stop)
            if done and due:
                self._wait()  # what is still queued is these steps' time, not the evaluation's
            if done:
                self.meter.stop(self.data.train.seqlens(indices))
        if done:
            self.step = number
            self.consumed += len(indices)
        return done

    def _compute(self, indices: np.ndarray, stop: StopRequest) -> bool:
        """Gradients, clipping and the update."""
        config, worker = self.config, self.worker
        num_valid = max(1, self.data.train.num_valid(indices))
        loss = worker.forward_backward(self.data.train, indices, num_valid, stop)
        if loss is None:
            return False
        self.grad_norm = worker.clip(config.optim.max_grad_norm)
        self.lr = learning_rate(self.step, config.steps, config.optim)
        worker.optimizer.step(self.lr)
        worker.zero_grad()
        self.loss, self.num_valid = loss, num_valid
        self._health += (loss + self.grad_norm) * 0.0
        return True

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- now and then --------------------------------------------------------------------------

    def _after_step(self) -> str:
        """Row, evaluation and checkpoint where they are due; returns the progress bar's note."""
        note = self._write_row() if self._due_row else ""
        self.eval_loss = None
        if self._due_eval(self.step):
            self._evaluate()
        if self._due_save(self.step):
            self._save()
        return note

    def _due_eval(self, step: int) -> bool:
        every = self.config.log.eval_every_steps
        return bool(every) and step % every == 0

    def _due_save(self, step: int) -> bool:
        every = self.config.checkpoint.every_steps
        return bool(every) and step % every == 0

    def _check_finite(self) -> None:
        if not math.isfinite(self._health.item()):
            saved = "no checkpoint yet" if not self.saved_step else f"step {self.saved_step}"
            raise common(
                UserError(
                    f"train: loss or gradient is not finite by step {self.step}; the last good "
                    f"state is {saved}; resume with a lower optim.lr or more warmup"
                )
            )

    def _write_row(self) -> str:
        self._check_finite()
        loss, rates = self.loss.item(), self.meter.read()
        self.rates = rates or self.rates
        self.losses.append(loss)
        step_ms = self.profiler.take()
        memory = self.ranks.any_of(peak_memory_bytes(self.device))
        row = self.log.write(
            "train",
            self.step,
            loss=loss,
            grad_norm=self.grad_norm.item(),
            lr=self.lr,
            consumed_samples=self.consumed,
            valid_tokens=self.num_valid,
            peak_memory_gib=memory / 2**30,
            **rates,
            **({} if step_ms is None else {"step_ms": step_ms}),
        )
        if self.on_step is not None:
            self.on_step(row)
        parts = "" if step_ms is None else f" [{shares(step_ms)}]"
        a_gpu = "" if self.ranks.size == 1 else f" ({self.rates['tokens_per_s_per_gpu']:,.0f} each)"
        return (
            f"loss {loss:.4f} norm {row['grad_norm']:.2f} lr {self.lr:.1e} "
            f"{self.rates['tokens_per_s']:,.0f} tok/s{a_gpu} "
            f"MFU {100 * self.rates['mfu_causal']:.1f}% causal "
            f"{100 * self.rates['mfu_noncausal']:.1f}% non-causal "
            f"{row['peak_memory_gib']:.2f} GiB{parts}"
        )

    def _evaluate(self) -> None:
        samples = self.data.evaluation
        if samples is None:
            return
        self.watchdog.beat(self.step, "evaluation")
        count = min(self.config.log.eval_samples, samples.num_samples)
        indices = sample_order(0, count, num_samples=samples.num_samples, seed=0)
        num_valid = max(1, samples.num_valid(indices))
        self.eval_loss = self.worker.loss_sum(samples, indices) / num_valid
        self.log.write(
            "eval",
            self.step,
            loss=self.eval_loss,
            perplexity=math.exp(min(self.eval_loss, 700.0)),
            valid_tokens=num_valid,
        )

    def _save(self) -> None:
        self._check_finite()
        self.watchdog.beat(self.step, "saving")
        config = self.config
        record = Record(
            step=self.step,
            consumed_samples=self.consumed,
            config=to_dict(config),
            facts={
                "config_hash": config_hash(config),
                "identity_hash": identity_hash(config),
                "identity": identity(config),
                "data_fingerprint": self.data.fingerprint,
                "model": self.worker.shape.to_hf(),
                "layout": config.layout.describe(),
                "ranks": self.ranks.size,
                "ridgeline": ridgeline.__version__,
                "torch": torch.__version__,
            },
            tokenizer=self.tokenizer.files(),
        )
        state = run_state(self.worker.pieces(), self.worker.optimizer, self.ranks.rank)
        with told_once():
            self.saver.save(record, state, beside=config.checkpoint.asynchronous)
        self.saved_step = self.step

    def _wait_for_save(self) -> None:
        self.watchdog.beat(self.step, "saving")
        with told_once():
            self.saver.wait()

    def _export(self) -> Path | None:
        config = self.config
        if not config.checkpoint.export:
            return None
        self.watchdog.beat(self.step, "exporting")
        folder = export_folder(config)
        dtype, tokenizer = torch_dtype(config.dtype), config.run_dir / "tokenizer"
        export(self.worker, folder, dtype, tokenizer, self.ranks)
        return folder

    def _result(self, interrupted: str | None, exported: Path | None) -> TrainResult:
        config = self.config
        if interrupted is not None and self.ranks.is_first:
            asked = interrupted == "stop_at_step"  # by a program, which knows how to go on
            progress.say(
                f"stopped by {interrupted} at step {self.step} of {config.steps}; state is saved "
                f"in {config.run_dir}" + ("" if asked else "; give the same command again to go on")
            )
        newest = scan(config.run_dir / "checkpoints")
        return TrainResult(
            run_dir=config.run_dir,
            step=self.step,
            steps=config.steps,
            consumed_samples=self.consumed,
            resumed_from=self.resumed_from,
            interrupted=interrupted,
            losses=tuple(self.losses),
            eval_loss=self.eval_loss,
            ranks=self.ranks.size,
            tokens_per_s=self.rates["tokens_per_s"],
            mfu_causal=self.rates["mfu_causal"],
            mfu_noncausal=self.rates["mfu_noncausal"],
            checkpoint=newest[0] if newest else None,
            exported=exported,
        )
