"""torch.nn.functional.scaled_dot_product_attention, routed to ours inside a `with` block.

    with routed_sdpa():
        out = model(x)        # whatever calls scaled_dot_product_attention here runs our kernels

The route is a TorchFunctionMode: it catches the function under every name it was imported by, in
this thread only, nests, ends with the block however that ends, and torch.compile and torch.export
know such modes (compiled code is compiled again where a mode comes or goes).

Meaning is PyTorch's: [..., S, D] layout, broadcast of leading dims, bool masks (True takes part),
float masks (added), is_causal from the TOP left (query i sees keys j <= i, whatever the lengths;
ours counts from the bottom right), scale, enable_gqa, and a row that sees nothing gives 0. Dropout
drops with the same probability, but from another stream. What ours does not take is handed to
PyTorch, with one warning a reason (see _not_ours).
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ridgeline.kernels.attention import flash_attn_func

_torch_sdpa = F.scaled_dot_product_attention
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_warned: set[str] = set()


def routed_sdpa(impl: str | None = None) -> RoutedSDPA:
    """A context manager in which F.scaled_dot_product_attention runs our attention.

    impl is an implementation's name; None lets the registry choose. Backward is deterministic where
    torch.use_deterministic_algorithms asks for it.
    """
    return RoutedSDPA(impl)


class RoutedSDPA(TorchFunctionMode):
    """The mode behind routed_sdpa()."""

    def __init__(self, impl: str | None = None) -> None:
        super().__init__()
        self.impl = impl

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _torch_sdpa:
            return _sdpa(self.impl, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            # Caught itself, and run outside the mode: its inner call is rerouted by hand.
            return _multi_head(self.impl)(*args, **kwargs)
        return func(*args, **kwargs)


def _multi_head(impl: str | None) -> Any:
    """F.multi_head_attention_forward whose scaled_dot_product_attention is ours."""

    def inner(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _sdpa(impl, *args, **kwargs)

    source = F.multi_head_attention_forward
    names = {**source.__globals__, "scaled_dot_product_attention": inner}
    copy = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    copy.__kwdefaults__ = source.__kwdefaults__
    return copy


def _sdpa(
    impl: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Ours, or PyTorch's for what ours does not take."""
    scale, enable_gqa = options.pop("scale", None), options.pop("enable_gqa", False)
    q, k, v = _one_dtype(query, key, value)
    reason = "an option of a newer PyTorch" if options else None
    reason = reason or _not_ours(q, k, v, attn_mask, dropout_p, is_causal, scale)
    if reason is not None:
        _warn_once(reason)
        options.update(scale=scale, enable_gqa=enable_gqa)
        return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)
    q, k, v, lead = _four_dims(q, k, v, enable_gqa)
    bias = None if attn_mask is None else _as_bias(attn_mask, q, k.shape[2], lead)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    common = {"dropout_p": dropout_p, "softmax_scale": scale, "impl": impl}
    common["deterministic"] = torch.are_deterministic_algorithms_enabled()
    S, T = q.shape[1], k.shape[1]
    if is_causal and T < S:  # rows from T on see every key
        parts = (_run(q[:, :T], k, v, causal=True, **common), _run(q[:, T:], k, v, **common))
        out = torch.cat(parts, dim=1)
    elif is_causal:  # keys from S on are seen by no row
        out = _run(q, k[:, :S], v[:, :S], causal=True, **common)
    else:
        out = _run(q, k, v, bias=bias, **common)
    return out.transpose(1, 2).reshape(*lead, S, v.shape[-1])


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _one_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    """Autocast's dtype where it is on: PyTorch casts for its own function only."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    to = torch.get_autocast_dtype(device)
    return q.to(to), k.to(to), v.to(to)


def _not_ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> str | None:
    """Why a call is PyTorch's, or None. A wrong call too: PyTorch says what is wrong with it."""
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    known = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    compiling = torch.compiler.is_compiling()
    if any(t.is_nested or (not compiling and type(t) not in known) for t in given):
        return "nested tensors and subclasses of Tensor"
    if not compiling and _functorch.peek_interpreter_stack() is not None:
        return "vmap, and other transforms of torch.func"
    wide = query.device.type == "cpu" and query.dtype == torch.float64
    if query.device.type not in ("cpu", "cuda") or any(t.device != query.device for t in given):
        return "devices other than CPU and CUDA, or several"
    if not wide and query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {query.dtype} on {query.device.type}"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "different dtypes"
    if min(t.dim() for t in (query, key, value)) < 3 or any(t.numel() == 0 for t in given):
        return "less than three dims, and empty tensors"
    if is_causal and attn_mask is not None:
        return "is_causal beside attn_mask"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return "masks that are neither bool nor in query's dtype"
    if not 0.0 <= dropout_p < 1.0 or (scale is not None and not scale > 0.0):
        return "dropout_p outside [0, 1), and scales that are not positive"
    if key.shape[-1] != query.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "key and value that do not match"
    return None


def _warn_once(reason: str) -> None:
    if torch.compiler.is_compiling() or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"sdpa: not taken by ridgeline and left to PyTorch: {reason}", UserWarning, stacklevel=5
    )


def _four_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """q [B, H, S, D], k, v [B, G, T, .], and the leading dims of the result ([..., H])."""
    if enable_gqa:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        heads = [(x.shape[-3],) for x in (query, key, value)]
    else:
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        batch, heads = lead[:-1], [lead[-1:]] * 3
    q, k, v = (
        x.expand(*batch, *h, *x.shape[-2:]).reshape(-1, *h, *x.shape[-2:])
        for x, h in zip((query, key, value), heads, strict=True)
    )
    return q, k, v, (*batch, *heads[0])


def _as_bias(mask: torch.Tensor, q: torch.Tensor, keys: int, lead: tuple[int, ...]) -> torch.Tensor:
    """A mask as a bias [B or 1, H or 1, S, T] in q's dtype."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = zero.expand(mask.shape).masked_fill(~mask, float("-inf"))
    mask = mask.to(q.dtype)
    pairs = (q.shape[2], keys)
    if mask.dim() <= 2:
        return mask.expand(1, 1, *pairs)
    if mask.dim() == 3:
        mask = mask.unsqueeze(0) if len(lead) > 1 else mask
    if len(lead) == 1:  # [H, S, D] inputs: one batch
        return mask.reshape(1, *mask.shape[-3:]).expand(1, -1, *pairs)
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:]).expand(1, -1, *pairs)
    return mask.expand(*lead[:-1], mask.shape[-3], *pairs).reshape(-1, mask.shape[-3], *pairs)
