"""Masters where no data rank shares a parameter: FSDP would gather and reduce nothing, only copy.

    compute dtype = master dtype    the parameters are their own masters
    otherwise                       parameters are copies in the compute dtype of fp32 masters

The copies are made anew once a step (6 bytes an element), and each micro-batch's gradient is added
to the master's as it is made (10 bytes), in the master's dtype: accumulation does not round to
bf16. FSDP over one rank moves about 34 bytes an element and micro-batch for the same.
"""

from __future__ import annotations

import torch
from torch import nn


def master_of(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A master without values for a parameter, which takes over its gradients; the parameter itself
    where the dtype is its own."""
    if parameter.dtype == dtype:
        return parameter
    master = nn.Parameter(torch.empty_like(parameter, dtype=dtype))

    def move(low: torch.Tensor) -> None:
        if low.grad is not None:  # none: it comes later (deferred.py)
            add_gradient(master, low.grad)
            low.grad = None

    parameter.register_post_accumulate_grad_hook(move)
    # Gradients that autograd does not deliver itself (deferred.py) find their way by this.
    parameter.master = master  # pyright: ignore[reportAttributeAccessIssue]
    return master


@torch.no_grad()
def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, or to its master's if it has one."""
    parameter = getattr(parameter, "master", parameter)
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
