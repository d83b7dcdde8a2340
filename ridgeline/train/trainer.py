"""The training loop of one process: `train(config)` from text files to a Hugging Face folder.

    for each step:   indices = order(consumed)            one integer, no loader state
                     n = valid targets of the global batch, counted from offsets
                     for each micro-batch: backward(sum of token losses / n)
                     clip by the global norm; AdamW at the step's learning rate
    now and then:    a row of metrics, an evaluation, a checkpoint

A step's result depends on (state, config, consumed) alone, so a run that was interrupted anywhere
and resumed equals one that was not, bitwise on a CPU with the same number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ridgeline
from ridgeline.core import progress
from ridgeline.core.errors import UserError, bad_value
from ridgeline.nn.hf import save_pretrained
from ridgeline.parallel.loss import linear_cross_entropy
from ridgeline.train import checkpoint
from ridgeline.train.config import (
    TrainConfig,
    config_hash,
    identity,
    identity_hash,
    require_files,
    to_dict,
)
from ridgeline.train.data import PackedBatch
from ridgeline.train.metrics import (
    Meter,
    MetricsLog,
    peak_memory_bytes,
    peak_of,
    require_tensorboard,
)
from ridgeline.train.optim import clip_gradients, learning_rate
from ridgeline.train.order import sample_order
from ridgeline.train.start import Start, choose_device, prepare
from ridgeline.train.stop import StopRequest

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
    tokens_per_s: float
    """Of the last logged interval."""
    mfu_causal: float
    mfu_noncausal: float
    checkpoint: Path | None
    """The newest checkpoint."""
    exported: Path | None
    """The Hugging Face folder."""


def train(
    config: TrainConfig, *, on_step: OnStep | None = None, stop_at_step: int | None = None
) -> TrainResult:
    """Train a decoder as a config says, going on from the run folder's newest good checkpoint.

    on_step is called with each logged row. stop_at_step stops there as an interrupt would: state is
    saved, the schedule still ends at config.steps.
    Raises: ValueError for a config that cannot be, UserError for files, disk and diverged training.
    """
    require_files(config)
    if stop_at_step is not None and stop_at_step < 1:
        raise bad_value("train", "stop_at_step", "be at least 1", stop_at_step, "leave it out")
    device = choose_device(config.device)
    if config.log.tensorboard:
        require_tensorboard()
    with checkpoint.run_lock(config.run_dir):
        run = _Run(prepare(config, device), on_step)
        try:
            return run.run(min(config.steps, stop_at_step or config.steps))
        finally:
            run.log.close()


class _Run:
    """A run in progress."""

    def __init__(self, start: Start, on_step: OnStep | None) -> None:
        self.config, self.device = start.config, start.device
        self.data, self.tokenizer = start.data, start.tokenizer
        self.model, self.optimizer, self.on_step = start.model, start.optimizer, on_step
        self.step, self.consumed = start.step, start.consumed_samples
        self.resumed_from = start.resumed_from
        self.saved_step = self.resumed_from
        self.losses: list[float] = []
        self.eval_loss: float | None = None
        self.rates = {"tokens_per_s": 0.0, "mfu_causal": 0.0, "mfu_noncausal": 0.0}
        peak, self.peak_source = peak_of(
            self.device, self.config.dtype, self.config.log.peak_tflops
        )
        self.peak_tflops = peak
        self.meter = Meter(self.model.config, self.config.data.seqlen, peak)
        self.log = MetricsLog(self.config.run_dir, self.config.log, self.step)
        # Not finite once a loss or a gradient was not; kept on the device, asked when a row is due.
        self._health = torch.zeros((), device=self.device)

    def run(self, last_step: int) -> TrainResult:
        """All steps up to `last_step`, then what the end asks for."""
        self._announce()
        steps = self.config.steps
        with StopRequest() as stop, progress.task("train", steps, "steps") as advance:
            advance(self.step)
            while self.step < last_step and stop.reason is None:
                if not self._train_step(stop):
                    break
                note = self._after_step()
                advance(1, note=note)
            interrupted = stop.reason or ("stop_at_step" if self.step < steps else None)
            if interrupted is None and self.eval_loss is None:
                self._evaluate()
            if self.saved_step != self.step:
                self._save()
        return self._finish(interrupted)

    def _announce(self) -> None:
        parameters = self.model.num_params()
        where = f"resuming at step {self.step}" if self.resumed_from is not None else "from step 0"
        progress.say(
            f"train {parameters / 1e6:.2f} M parameters on {self.device} in {self.config.dtype}, "
            f"{where} of {self.config.steps}; {self.data.train.num_samples} samples of "
            f"{self.config.data.seqlen} tokens; MFU over {self.peak_tflops:g} TFLOP/s: "
            f"{self.peak_source}"
        )
        self.log.write(
            "run",
            self.step,
            parameters=parameters,
            device=str(self.device),
            dtype=self.config.dtype,
            train_samples=self.data.train.num_samples,
            train_tokens=self.data.train.num_tokens,
            peak_tflops=self.peak_tflops,
            peak_source=self.peak_source,
            config_hash=config_hash(self.config),
            versions={"ridgeline": ridgeline.__version__, "torch": torch.__version__},
        )

    # ---- one step ------------------------------------------------------------------------------

    def _train_step(self, stop: StopRequest) -> bool:
        """One optimizer step; False where it was abandoned for a stop, with nothing changed."""
        config = self.config
        self.meter.start()
        indices = self.data.order(self.consumed, config.batch_samples)
        num_valid = max(1, self.data.train.num_valid(indices))
        loss = torch.zeros((), device=self.device)
        seqlens: list[int] = []
        for start in range(0, len(indices), config.micro_batch_samples):
            if stop.reason is not None:
                self.optimizer.zero_grad()
                return False
            micro = self.data.train.batch(indices[start : start + config.micro_batch_samples])
            seqlens += micro.seqlens
            loss_sum = self._loss_sum(micro.to(self.device)) / num_valid
            loss_sum.backward()
            loss += loss_sum.detach()
        self.grad_norm = clip_gradients([self.optimizer], config.optim.max_grad_norm)
        self.lr = learning_rate(self.step, config.steps, config.optim)
        self.optimizer.step(self.lr)
        self.optimizer.zero_grad()
        self.loss, self.num_valid = loss, num_valid
        self._health += (loss + self.grad_norm) * 0.0
        self.step += 1
        self.consumed += len(indices)
        self._due_row = self.step % config.log.every_steps == 0 or self.step == config.steps
        if self._due_row or self._due_eval() or self._due_save():
            self._wait()  # what is still queued is these steps' time, not the evaluation's
        self.meter.stop(seqlens)
        return True

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loss_sum(self, batch: PackedBatch) -> torch.Tensor:
        """Summed loss of a packed batch; only a chunk's logits exist at once."""
        shape = (-1, self.config.data.seqlen)
        x_BSC = self.model.hidden(
            batch.token_ids_P.view(shape),
            positions=batch.position_ids_P.view(shape),
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
        assert self.model.model.norm is not None and self.model.lm_head is not None
        x_PC = self.model.model.norm(x_BSC).flatten(0, 1)
        weight_VC = self.model.lm_head.weight
        chunk = self.config.loss_chunk_tokens
        return linear_cross_entropy(x_PC, weight_VC, batch.targets_P, chunk=chunk)[0]

    # ---- now and then --------------------------------------------------------------------------

    def _after_step(self) -> str:
        """Row, evaluation and checkpoint where they are due; returns the progress bar's note."""
        note = self._write_row() if self._due_row else ""
        self.eval_loss = None
        if self._due_eval():
            self._evaluate()
        if self._due_save():
            self._save()
        return note

    def _due_eval(self) -> bool:
        every = self.config.log.eval_every_steps
        return bool(every) and self.step % every == 0

    def _due_save(self) -> bool:
        every = self.config.checkpoint.every_steps
        return bool(every) and self.step % every == 0

    def _check_finite(self) -> None:
        if not math.isfinite(self._health.item()):
            saved = "no checkpoint yet" if not self.saved_step else f"step {self.saved_step}"
            raise UserError(
                f"train: loss or gradient is not finite by step {self.step}; the last good state "
                f"is {saved}; resume with a lower optim.lr or more warmup"
            )

    def _write_row(self) -> str:
        self._check_finite()
        loss, self.rates = self.loss.item(), self.meter.read()
        self.losses.append(loss)
        row = self.log.write(
            "train",
            self.step,
            loss=loss,
            grad_norm=self.grad_norm.item(),
            lr=self.lr,
            consumed_samples=self.consumed,
            valid_tokens=self.num_valid,
            peak_memory_gib=peak_memory_bytes(self.device) / 2**30,
            **self.rates,
        )
        if self.on_step is not None:
            self.on_step(row)
        return (
            f"loss {loss:.4f} norm {row['grad_norm']:.2f} lr {self.lr:.1e} "
            f"{row['tokens_per_s']:,.0f} tok/s MFU {100 * row['mfu_causal']:.1f}% causal "
            f"{100 * row['mfu_noncausal']:.1f}% non-causal {row['peak_memory_gib']:.2f} GiB"
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        samples = self.data.evaluation
        if samples is None:
            return
        count = min(self.config.log.eval_samples, samples.num_samples)
        indices = sample_order(0, count, num_samples=samples.num_samples, seed=0)
        total, size = 0.0, self.config.micro_batch_samples
        for start in range(0, count, size):
            batch = samples.batch(indices[start : start + size]).to(self.device)
            total += self._loss_sum(batch).item()
        num_valid = max(1, samples.num_valid(indices))
        self.eval_loss = total / num_valid
        self.log.write(
            "eval",
            self.step,
            loss=self.eval_loss,
            perplexity=math.exp(min(self.eval_loss, 700.0)),
            valid_tokens=num_valid,
        )

    def _save(self) -> None:
        self._check_finite()
        config = self.config
        snapshot = checkpoint.Snapshot(
            step=self.step,
            consumed_samples=self.consumed,
            config=to_dict(config),
            facts={
                "config_hash": config_hash(config),
                "identity_hash": identity_hash(config),
                "identity": identity(config),
                "data_fingerprint": self.data.fingerprint,
                "ridgeline": ridgeline.__version__,
                "torch": torch.__version__,
            },
            model={name: p.detach() for name, p in self.model.named_parameters()},
            optimizer=self.optimizer.state_tensors(),
            rng=checkpoint.rng_state(),
            tokenizer=self.tokenizer.files(),
        )
        folder = config.run_dir / "checkpoints"
        checkpoint.save(folder, snapshot, keep_last=config.checkpoint.keep_last)
        self.saved_step = self.step

    def _finish(self, interrupted: str | None) -> TrainResult:
        config, exported = self.config, None
        if interrupted is not None:
            progress.say(
                f"stopped by {interrupted} at step {self.step} of {config.steps}; state is saved "
                f"in {config.run_dir}; give the same command again to go on"
            )
        elif config.checkpoint.export:
            exported = config.run_dir / "model"
            source = config.run_dir / "tokenizer"
            save_pretrained(self.model, exported, tokenizer_from=source, overwrite=True)
        newest = checkpoint.scan(config.run_dir / "checkpoints")
        return TrainResult(
            run_dir=config.run_dir,
            step=self.step,
            steps=config.steps,
            consumed_samples=self.consumed,
            resumed_from=self.resumed_from,
            interrupted=interrupted,
            losses=tuple(self.losses),
            eval_loss=self.eval_loss,
            tokens_per_s=self.rates["tokens_per_s"],
            mfu_causal=self.rates["mfu_causal"],
            mfu_noncausal=self.rates["mfu_noncausal"],
            checkpoint=newest[0] if newest else None,
            exported=exported,
        )
