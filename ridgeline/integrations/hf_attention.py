"""The attention function that Transformers' models call.

In: q [B, H, S, D], k and v [B, G, T, D] (key/value heads not repeated), a mask, and keyword
arguments of which those that change the result are honoured or refused by name. Out: ([B, S, H, V],
None). A mask made by hf_masks.py costs nothing S x T; a bool or float mask [B, 1 or H, S, T], as a
caller may give, is everything that masks (as in Transformers' own `eager` and `sdpa`) and is added
to the scores as a bias.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.core.errors import bad_value, unsupported
from ridgeline.integrations.hf_masks import decode, is_coded, is_window_only, starts_of
from ridgeline.kernels.attention import flash_attn_func, flash_attn_varlen_func

_REFUSED = {
    "block_table": 'use attn_implementation="ridgeline_flash" for a paged cache',
    "page_table": 'use attn_implementation="ridgeline_flash" for a paged cache',
    "k_cache": 'use attn_implementation="ridgeline_flash" for a paged cache',
    "head_mask": "drop heads in the model",
}


@dataclass(frozen=True, slots=True)
class _Call:
    """One call in our layouts: q_BSHD, k_BTGD, v_BTGV and the options."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    window: int | None
    """Keys seen to the left, the query's own included."""
    options: dict[str, Any]

    @property
    def window_size(self) -> tuple[int | None, int | None]:
        if self.window is None:
            return (None, None)
        return (self.window - 1, None if self.causal else self.window - 1)


def ridgeline_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as Transformers' attention interface has it.

    Shapes: query [B, H, S, D], key and value [B, G, T, D or V] -> [B, S, H, V].
    Honoured: is_causal, sliding_window, softcap, s_aux, position_bias, deterministic, position_ids
    (rows packed by restarts), cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k.
    Raises: NotImplementedError and ValueError, naming what is refused.
    """
    _refuse(kwargs)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    q, k, v = _one_dtype(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    options = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "softcap": kwargs.get("softcap") or 0.0,
        "deterministic": bool(kwargs.get("deterministic")),
        "sinks": kwargs.get("s_aux"),
    }
    call = _Call(q, k, v, bool(causal), kwargs.get("sliding_window"), options)
    bias = kwargs.get("position_bias")
    starts = _given_starts(kwargs)
    unmasked = attention_mask is None or is_window_only(attention_mask)
    if starts is None and unmasked and not torch.compiler.is_compiling():
        starts = _starts_of_positions(kwargs.get("position_ids"), q, k)
        if starts is not None and attention_mask is not None:
            call = replace(call, window=decode(attention_mask).window)
    if starts is not None:
        return _packed(call, *starts, bias), None
    return _masked(call, attention_mask, bias), None


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise unsupported(
            "attention",
            "output_attentions",
            'be False with attn_implementation="ridgeline"',
            True,
            'the weights are never formed; use attn_implementation="eager"',
        )
    for name, do in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise unsupported("attention", name, "be None", "a tensor", do)


def _one_dtype(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One dtype for all: autocast's where it is on, else v's (adapters can leave q in fp32)."""
    to = v.dtype
    if torch.is_autocast_enabled(v.device.type):
        to = torch.get_autocast_dtype(v.device.type)
    return q.to(to), k.to(to), v.to(to)


def _masked(call: _Call, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Attention under a mask of any of the accepted forms."""
    if mask is None:
        return _dense(call, bias)
    if is_coded(mask):
        seen = decode(mask)
        call = replace(call, window=seen.window)
        if seen.starts_N is not None:
            assert seen.longest is not None
            pair = (seen.starts_N, seen.starts_N)
            return _packed(call, pair, (seen.longest, seen.longest), bias)
        if seen.spans_B2 is None:
            return _dense(call, bias)
        first_B, end_B = seen.spans_B2.unbind(1)
        return _dense(call, bias, leftpad_k=first_B.contiguous(), seqused_k=end_B.contiguous())
    if mask.dim() == 2 and not mask.is_floating_point():
        padding = mask[:, None, None, : call.k.shape[1]].bool()
        return _dense(call, _sum(_as_bias(padding, call), bias))
    if mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point()):
        call = replace(call, causal=False, window=None)
        return _dense(call, _sum(_as_bias(mask[..., : call.k.shape[1]], call), bias))
    raise bad_value(
        "attention",
        "attention_mask",
        "be [batch, keys], or bool or float [batch, 1 or heads, queries, keys]",
        f"{tuple(mask.shape)} {mask.dtype}",
        "convert it",
    )


def _as_bias(mask: torch.Tensor, call: _Call) -> torch.Tensor:
    """A bool or additive mask as a bias in q's dtype."""
    if mask.dtype != torch.bool:
        return mask.to(call.q.dtype)
    zero = torch.zeros((), dtype=call.q.dtype, device=mask.device)
    return zero.expand(mask.shape).masked_fill(~mask, float("-inf"))


def _sum(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return a if b is None else a + b.to(a.dtype)


def _dense(call: _Call, bias: torch.Tensor | None, **lengths: torch.Tensor) -> torch.Tensor:
    if bias is not None:
        pairs = (call.q.shape[1], call.k.shape[1])
        bias = bias[..., : pairs[1]].expand(*bias.shape[:2], *pairs).to(call.q.dtype)
    out = flash_attn_func(
        call.q,
        call.k,
        call.v,
        causal=call.causal,
        window_size=call.window_size,
        bias=bias,
        **lengths,
        **call.options,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _packed(
    call: _Call,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of sequences packed into rows: each sees itself only."""
    if bias is not None:
        raise unsupported(
            "attention", "position_bias", "be None with packed rows", "a tensor", "pad the rows"
        )
    q, k, v = (x.flatten(0, 1) for x in (call.q, call.k, call.v))
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        *starts,
        *longest,
        causal=call.causal,
        window_size=call.window_size,
        **call.options,
    )
    assert isinstance(out, torch.Tensor)
    return out.view(*call.q.shape[:2], *out.shape[1:])


Starts = tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]


def _given_starts(kwargs: dict[str, Any]) -> Starts | None:
    """Starts and longest lengths that the caller gave (either spelling), or None."""
    starts = [kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    longest = [
        kwargs.get(name) if kwargs.get(name) is not None else kwargs.get(old)
        for name, old in (("max_length_q", "max_seqlen_q"), ("max_length_k", "max_seqlen_k"))
    ]
    given = [value is not None for value in (*starts, *longest)]
    if not any(given[:2]):
        return None
    if not all(given):
        raise bad_value(
            "attention",
            "cu_seq_lens_q",
            "come with cu_seq_lens_k, max_length_q and max_length_k",
            [name for name in kwargs if name.startswith(("cu_seq", "max_"))],
            "give all four",
        )
    return (
        (starts[0].to(torch.int32), starts[1].to(torch.int32)),  # type: ignore[union-attr]
        (int(longest[0]), int(longest[1])),  # type: ignore[arg-type]
    )


_last_positions: tuple[weakref.ref[torch.Tensor], int | None, Starts | None] | None = None
"""The positions looked at last: every layer of a model is given the same tensor."""


def _starts_of_positions(
    position_ids: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> Starts | None:
    """Starts of sequences in a row whose positions restart, or None for one sequence.

    Looked for in single rows without earlier keys, as Transformers does for FlashAttention; reads
    the positions on the host, once a forward pass.
    """
    global _last_positions
    one_row = q.shape[0] == 1 and q.shape[1] == k.shape[1] and q.shape[1] > 1
    if not one_row or position_ids is None or position_ids.dim() != 2:
        return None
    if tuple(position_ids.shape) != (1, q.shape[1]):
        return None
    version = None if position_ids.is_inference() else position_ids._version
    last = _last_positions
    if last is not None and last[0]() is position_ids and last[1] == version:
        return last[2]
    found: Starts | None = None
    restart = position_ids.diff(dim=1) != 1
    if bool(restart.any()):
        segment = torch.nn.functional.pad(restart.cumsum(1), (1, 0))
        starts_N, longest = starts_of(segment)
        found = (starts_N, starts_N), (longest, longest)
    _last_positions = (weakref.ref(position_ids), version, found)
    return found
