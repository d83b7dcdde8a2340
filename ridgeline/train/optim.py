"""AdamW over the named parameters of one model part, its schedule, and clipping by the global norm.

    m <- b1 m + (1 - b1) g ;  v <- b2 v + (1 - b2) g^2 ;  p <- p - lr (m' / (sqrt(v') + eps) +
    decay p)

with bias-corrected m', v', on fp32 values: a parameter of another dtype has a fp32 master copy,
into whose gradient each micro-batch's gradient is added, so that accumulation does not round to
bf16. State is keyed by full parameter name. Memory bound: 16 bytes a parameter are read and 12
written. Sources: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv 1711.05101)
and "SGDR" (1608.03983) for the cosine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ridgeline.train.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of a step (0 is the first): linear warmup to the peak, then half a cosine down
    to min_lr_ratio of it at the last step. A function of the step alone, so resuming needs no
    state."""
    warmup = warmup_steps(steps, config)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    span = steps - 1 - warmup
    progress = min(1.0, (step - warmup) / span) if span > 0 else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def warmup_steps(steps: int, config: OptimConfig) -> int:
    """Steps of the linear rise: those asked for, else a tenth of the run and 20 at the most."""
    return min(20, steps // 10) if config.warmup_steps is None else config.warmup_steps


class PartOptimizer:
    """AdamW of one model part (the whole model in one process; a stage of a pipeline)."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig
    ) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.masters = {name: _master(p) for name, p in self.parameters.items()}
        self._low = [n for n, p in self.parameters.items() if p is not self.masters[n]]
        decayed = [p for p in self.masters.values() if p.dim() >= 2]
        others = [p for p in self.masters.values() if p.dim() < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (others, 0.0))
            if params
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def gradients(self) -> list[torch.Tensor]:
        """The fp32 gradients there are, in parameter order."""
        return [p.grad for p in self.masters.values() if p.grad is not None]

    def zero_grad(self) -> None:
        """Drop gradients (of an applied or an abandoned step)."""
        for table in (self.parameters, self.masters):
            for parameter in table.values():
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients at a learning rate and round masters into their parameters."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        if self._low:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [self.parameters[n] for n in self._low], [self.masters[n] for n in self._low]
            )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The moments, as "exp_avg.<name>", "exp_avg_sq.<name>" and "step.<name>"; empty before the
        first step."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for kind, tensor in self._adamw.state.get(master, {}).items():
                found[f"{kind}.{name}"] = tensor
        return found

    def reset_state(self, *, stepped: bool) -> None:
        """Moments of zero to be written over (stepped), or none, as before the first step."""
        self._adamw.state.clear()
        for master in self.masters.values() if stepped else ():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Round masters that were written over into their parameters."""
        for name in self._low:
            self.parameters[name].copy_(self.masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))

    def move_gradient(low: torch.Tensor) -> None:
        assert low.grad is not None
        if master.grad is None:
            master.grad = low.grad.to(torch.float32)
        else:
            master.grad += low.grad
        low.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)
    return master


def clip_gradients(optimizers: Sequence[PartOptimizer], max_norm: float | None) -> torch.Tensor:
    """Scale all parts' gradients so that their common 2-norm is at most `max_norm`.

    Returns the norm before clipping, an fp32 scalar on the device. None: not clipped.
    """
    gradients = [gradient for part in optimizers for gradient in part.gradients()]
    norm = get_total_norm(gradients)
    if max_norm is not None:
        masters = [p for part in optimizers for p in part.masters.values()]
        clip_grads_with_norm_(masters, max_norm, norm)
    return norm
