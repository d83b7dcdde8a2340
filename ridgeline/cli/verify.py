"""`ridgeline verify`: is this layout the same as one process?

A layout that cannot be is refused before PyTorch is imported.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError, bad_value, common
from ridgeline.parallel.layout import Layout, Workload, check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """A tiny decoder; what is not given is made to fit the layout."""

    num_layers: int | None = None
    """Blocks; none: four, or one a stage."""
    num_heads: int | None = None
    """Query heads; none: the least multiple of tp from 4 on."""
    num_kv_heads: int | None = None
    """Key-value heads; none: half the query heads."""
    head_dim: int = 8
    """Width of a head, even."""
    intermediate_size: int | None = None
    """Width of the MLP; none: the least multiple of tp from 48 on."""
    vocab_size: int = 67
    """Tokens of the vocabulary; need not divide by tp."""
    tie_embeddings: bool = True
    """The head's weight is the embedding's."""
    qk_norm: bool = False
    """Norms over each head's q and k (Qwen 3)."""

    def fitted(self, layout: Layout, seqlen: int) -> dict[str, Any]:
        """The decoder for a layout, as the arguments of DecoderConfig."""
        tp = layout.tp
        num_heads = self.num_heads or math.ceil(4 / tp) * tp
        num_kv_heads = self.num_kv_heads or max(1, num_heads // 2)
        if self.num_kv_heads is None and max(num_kv_heads, tp) % min(num_kv_heads, tp):
            num_kv_heads = num_heads
        return dict(
            family="qwen3" if self.qk_norm else "llama",
            qk_norm=self.qk_norm,
            vocab_size=self.vocab_size,
            hidden_size=num_heads * self.head_dim,
            intermediate_size=self.intermediate_size or math.ceil(48 / tp) * tp,
            num_layers=self.num_layers or max(4, layout.num_stages),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            max_seqlen=max(seqlen, 64),
            tie_embeddings=self.tie_embeddings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """Compare a parallel layout with one process, tensor by tensor, on a tiny model."""

    layout: Layout = field(default_factory=Layout)
    """How the ranks are used."""
    shape: TinyShape = field(default_factory=TinyShape)
    """The model."""
    steps: int = 3
    """Optimizer steps, at least 1."""
    seqlen: int | None = None
    """Tokens of a sample (packed documents); none: 32, or what the layout needs."""
    micro_batch_samples: int = 2
    """Samples of a micro-batch, at least 1."""
    seed: int = 0
    """Of weights and batches."""
    tolerance: float = 1e-5
    """Largest relative difference that passes (fp32)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: gloo; cuda: NCCL, a GPU a rank."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch_samples"):
            if getattr(self, name) < 1:
                raise bad_value("verify", name, "be at least 1", getattr(self, name), "raise it")
        if not 0 < self.tolerance < 1:
            raise bad_value("verify", "tolerance", "lie in (0, 1)", self.tolerance, "try 1e-5")


def verify(config: VerifyConfig) -> Result:
    """Train a tiny model a few steps under a layout and in one process, and compare all of it.

    Raises: ValueError for a layout that cannot be; UserError, naming the first quantity that is off
    and all tensors whose gradient is, where they differ.
    """
    try:
        return _verify(config)
    except Exception as error:
        raise common(error) from error.__cause__  # rank 0 says it


def _verify(config: VerifyConfig) -> Result:
    layout = config.layout
    seqlen = config.seqlen or 32 * math.lcm(1, layout.tp * layout.cp)
    shape = config.shape.fitted(layout, seqlen)
    num_microbatches = layout.num_microbatches or (layout.num_stages if layout.pp > 1 else 1)
    started = env.world_size() if env.world_size() > 1 else layout.world_size
    for warning in check_layout(
        layout, workload(shape, seqlen, num_microbatches), world_size=started
    ):
        progress.say(f"warning: {warning}")
    on_ranks = importlib.import_module("ridgeline.parallel.launch").on_ranks
    parallel = importlib.import_module("ridgeline.parallel.verify")
    asked = parallel.Comparison(
        layout=layout,
        shape=shape,
        seqlen=seqlen,
        micro_batch_samples=config.micro_batch_samples,
        num_microbatches=num_microbatches,
        steps=config.steps,
        seed=config.seed,
        tolerance=config.tolerance,
    )
    ok, report = on_ranks(started, config.device, parallel.compare_layout, asked)
    if not ok:
        raise UserError("" if report is None else _difference(layout, report))
    if report is None:  # rank 0 of torchrun says it
        return {"ok": True}
    return {"layout": layout.describe(), "ranks": started, **asdict(report), "ok": True}


def workload(shape: dict[str, Any], seqlen: int, num_microbatches: int) -> Workload:
    """The sizes of a fitted decoder that a layout must divide."""
    names = ("num_layers", "num_heads", "num_kv_heads", "vocab_size", "hidden_size")
    sizes = {name: shape[name] for name in (*names, "intermediate_size")}
    return Workload(seqlen=seqlen, num_microbatches=num_microbatches, **sizes)


def _difference(layout: Layout, report: Any) -> str:
    assert report.first is not None
    tensors = ", ".join(report.diverged[:4]) + (" ..." if len(report.diverged) > 4 else "")
    return (
        f"verify: {layout.describe()} differs from one process in step {report.first.step}: "
        f"{report.first.name} by {report.first.error:.1e} relative; loss {report.losses[0]:.6f} "
        f"for {report.reference_losses[0]:.6f}, gradient norm {report.norms[0]:.6f} for "
        f"{report.reference_norms[0]:.6f}; {len(report.diverged)} gradients are off, first "
        f"{tensors or 'none'}"
    )


def show(result: Result) -> str:
    """What agreed, and how far."""
    if "layout" not in result:
        return ""
    worst = result["worst"]
    rows = zip(
        result["losses"],
        result["reference_losses"],
        result["norms"],
        result["reference_norms"],
        strict=True,
    )
    lines = [f"{result['layout']} on {result['ranks']} ranks equals one process in fp32"]
    lines += [
        f"step {step}: loss {loss:.7f} ({one:.7f}), gradient norm {norm:.7f} ({one_norm:.7f})"
        for step, (loss, one, norm, one_norm) in enumerate(rows)
    ]
    lines.append(
        f"largest difference {worst['error']:.1e} relative ({worst['name']}, step {worst['step']})"
    )
    return "\n".join(lines)


COMMAND = Command(run=verify, config=VerifyConfig, show=show, kept=nothing_kept)
