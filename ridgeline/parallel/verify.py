"""Is a layout the same as one process? k steps of both on the same batches, compared by name.

Rank 0 also trains a plain Decoder in fp32 on whole batches. After each step loss, gradient norm and
every parameter's whole gradient are compared, then both take the same plain gradient step, and at
the end every parameter is compared. The first tensor that is off is named: a dropped all-reduce, a
wrong scale or an unsplit layer shows in a few names, which say where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.parallel.layout import Layout, Workload
from ridgeline.parallel.loss import IGNORE, linear_cross_entropy
from ridgeline.parallel.mesh import build_world
from ridgeline.parallel.model import ModelOptions, ParallelModel
from ridgeline.parallel.stage import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBatch:
    """A packed micro-batch of random documents (what train/data.py makes of text)."""

    token_ids_P: torch.Tensor
    targets_P: torch.Tensor
    position_ids_P: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    seqlens: tuple[int, ...]
    num_valid: int

    def to(self, device: torch.device) -> RandomBatch:
        """The same on a device."""
        return RandomBatch(
            token_ids_P=self.token_ids_P.to(device),
            targets_P=self.targets_P.to(device),
            position_ids_P=self.position_ids_P.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            max_seqlen=self.max_seqlen,
            seqlens=self.seqlens,
            num_valid=self.num_valid,
        )


def random_batch(samples: Sequence[int], seqlen: int, vocab_size: int, seed: int) -> RandomBatch:
    """The samples of these indices: each a function of (seed, index), cut into a few documents."""
    tokens, targets, lengths = [], [], []
    for index in samples:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + int(index))
        ids = torch.randint(vocab_size, (seqlen + 1,), generator=generator)
        wanted = ids[1:].clone()
        cuts = torch.randperm(seqlen - 1, generator=generator)[: int(index) % 4] + 1
        ends = sorted({*cuts.tolist(), seqlen})
        for end in ends[:-1]:
            wanted[end - 1] = IGNORE
        lengths += [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        tokens.append(ids[:-1])
        targets.append(wanted)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    joined = torch.cat(targets)
    return RandomBatch(
        token_ids_P=torch.cat(tokens),
        targets_P=joined,
        position_ids_P=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=cu,
        max_seqlen=max(lengths),
        seqlens=tuple(lengths),
        num_valid=int((joined != IGNORE).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one quantity of one step is off."""

    step: int
    name: str
    """loss, gradient norm, gradient of <name>, or weights of <name>."""
    error: float
    """Largest absolute difference over the largest reference value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a comparison found."""

    steps: int
    tolerance: float
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    norms: tuple[float, ...]
    reference_norms: tuple[float, ...]
    worst: Difference
    first: Difference | None
    """The first quantity beyond the tolerance, in the order loss, norm, then names as the model
    lists them; None: all within."""
    diverged: tuple[str, ...]
    """Names of all tensors whose gradient was beyond it in the first step that had one."""

    @property
    def ok(self) -> bool:
        return self.first is None


class _Comparison:
    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.differences: list[Difference] = []

    def number(self, step: int, name: str, got: float, want: float) -> None:
        self._add(step, name, abs(got - want) / max(abs(want), 1e-30))

    def tensor(
        self, step: int, name: str, got: torch.Tensor, want: torch.Tensor, least: float
    ) -> None:
        scale = max(want.abs().max().item(), least)
        self._add(step, name, (got - want).abs().max().item() / max(scale, 1e-30))

    def _add(self, step: int, name: str, error: float) -> None:
        error = error if error == error else float("inf")  # NaN is the farthest off
        self.differences.append(Difference(step=step, name=name, error=error))

    @property
    def beyond(self) -> list[Difference]:
        return [d for d in self.differences if d.error > self.tolerance]


class Reference:
    """One process: a plain decoder that takes the same steps."""

    def __init__(
        self, config: DecoderConfig, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.model = Decoder(config, seed=seed, device=device)
        self.parameters = dict(self.model.named_parameters())

    def forward_backward(self, batch: Packed, num_valid: int) -> tuple[float, float]:
        """(loss, gradient norm) of a whole global batch given as one packed batch."""
        self.model.zero_grad()
        x = self.model.hidden(
            batch.token_ids_P[None],
            positions=batch.position_ids_P[None],
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
        assert self.model.model.norm is not None and self.model.lm_head is not None
        x = self.model.model.norm(x).flatten(0, 1)
        loss, _ = linear_cross_entropy(x, self.model.lm_head.weight, batch.targets_P)
        loss = loss / max(1, num_valid)
        loss.backward()
        squares = [self.gradient(name).double().square().sum() for name in self.parameters]
        return loss.item(), torch.stack(squares).sum().sqrt().item()

    def gradient(self, name: str) -> torch.Tensor:
        """A parameter's gradient."""
        gradient = self.parameters[name].grad
        assert gradient is not None
        return gradient

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """A plain gradient step."""
        for name, parameter in self.parameters.items():
            parameter -= rate * self.gradient(name)


def compare(
    model: ParallelModel,
    *,
    batch_samples: int,
    steps: int = 3,
    seed: int = 0,
    rate: float = 0.5,
    tolerance: float = 1e-5,
) -> Report | None:
    """Run `steps` steps of a layout and of one process; the report on rank 0, None elsewhere.

    A collective of all ranks. The model gets fresh weights of `seed`. tolerance: relative, fp32.
    """
    config, world, options = model.config, model.world, model.options
    model.init_weights(seed)
    reference = Reference(config, seed, world.device) if world.is_first else None
    found = _Comparison(tolerance)
    series: dict[str, list[float]] = {key: [] for key in ("loss", "ref_loss", "norm", "ref_norm")}
    for step in range(steps):
        indices = list(range(step * batch_samples, (step + 1) * batch_samples))
        whole = random_batch(indices, options.seqlen, config.vocab_size, seed).to(world.device)
        own = [
            random_batch(some, options.seqlen, config.vocab_size, seed).to(world.device)
            for some in model.micro_batches(indices)
        ]
        loss = model.forward_backward(own, whole.num_valid).item()
        norm = model.clip(None).item()
        series["loss"].append(loss)
        series["norm"].append(norm)
        least = 0.0
        if reference is not None:
            ref_loss, ref_norm = reference.forward_backward(whole, whole.num_valid)
            series["ref_loss"].append(ref_loss)
            series["ref_norm"].append(ref_norm)
            found.number(step, "loss", loss, ref_loss)
            found.number(step, "gradient norm", norm, ref_norm)
            least = 1e-3 * max(reference.gradient(n).abs().max().item() for n in model.all_names)
        for name in model.all_names:
            gradient = model.full_gradient(name)
            if reference is not None:
                want = reference.gradient(name).cpu()
                found.tensor(step, f"gradient of {name}", gradient, want, least)
        _update(model, rate)
        if reference is not None:
            reference.update(rate)
    for name in model.all_names:
        weights = model.full(name)
        if reference is not None:
            want = reference.parameters[name].detach().cpu()
            found.tensor(steps - 1, f"weights of {name}", weights, want, 1e-3)
    return None if reference is None else _report(found, steps, series)


@torch.no_grad()
def _update(model: ParallelModel, rate: float) -> None:
    for local in model.parameters_here().values():
        assert local.grad is not None
        local -= rate * local.grad
    model.zero_grad()


def _report(found: _Comparison, steps: int, series: dict[str, list[float]]) -> Report:
    beyond = found.beyond
    first = beyond[0] if beyond else None
    prefix = "gradient of "
    diverged: list[str] = []
    if first is not None:
        diverged = [
            d.name.removeprefix(prefix)
            for d in beyond
            if d.step == first.step and d.name.startswith(prefix)
        ]
    return Report(
        steps=steps,
        tolerance=found.tolerance,
        losses=tuple(series["loss"]),
        reference_losses=tuple(series["ref_loss"]),
        norms=tuple(series["norm"]),
        reference_norms=tuple(series["ref_norm"]),
        worst=max(found.differences, key=lambda d: d.error),
        first=first,
        diverged=tuple(diverged),
    )


def workload(config: DecoderConfig, seqlen: int, num_microbatches: int) -> Workload:
    """A decoder's sizes, for layout.check_layout."""
    return Workload(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        seqlen=seqlen,
        num_microbatches=num_microbatches,
        windowed=config.sliding_window is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared: plain values, which reach ranks that are started anew."""

    layout: Layout
    shape: dict[str, Any]
    """Arguments of DecoderConfig."""
    seqlen: int
    micro_batch_samples: int
    num_microbatches: int
    steps: int
    seed: int
    tolerance: float


def compare_layout(device: torch.device, asked: Comparison) -> tuple[bool, Report | None]:
    """Build a layout on this rank and compare it; (whether it agrees, the report on rank 0)."""
    options = ModelOptions(
        seqlen=asked.seqlen,
        micro_batch_samples=asked.micro_batch_samples,
        num_microbatches=asked.num_microbatches,
    )
    world = build_world(asked.layout, device)
    report = compare(
        ParallelModel(DecoderConfig(**asked.shape), world, options),
        batch_samples=asked.micro_batch_samples * asked.num_microbatches * asked.layout.dp,
        steps=asked.steps,
        seed=asked.seed,
        tolerance=asked.tolerance,
    )
    return agree_on_failure(report is None or report.ok), report


def agree_on_failure(ok: bool) -> bool:
    """Rank 0's verdict, told to every rank, so that all exit alike."""
    verdict = [ok]
    if dist.is_initialized():
        dist.broadcast_object_list(verdict, 0)
    return bool(verdict[0])
