"""How the decoder family (nn/decoder.py) is split over the tensor axis.

    embedding                  rows (vocabulary)
    q, k, v; gate, up          columns: whole heads, parts of the MLP's width
    o; down                    rows, then one all-reduce (or reduce-scatter) each
    head                       rows (vocabulary), loss on parts
    norms                      whole

So a block talks twice forward and twice backward, b s C elements each. Key-value heads fewer than
ranks: every rank keeps all of k and v and computes the one head it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.parallel import tensor
from ridgeline.parallel.plans.apply import Plan, apply_plan
from ridgeline.parallel.tensor import Axis, Split


def decoder_plan(config: DecoderConfig, split: Split) -> Plan:
    """The plan of a decoder."""
    axis, block = split.axis, "model.layers.*"

    def column(module: nn.Module) -> nn.Module:
        return tensor.ColumnLinear(cast(nn.Linear, module), split)

    def row(module: nn.Module) -> nn.Module:
        return tensor.RowLinear(cast(nn.Linear, module), split)

    def shared_heads(module: nn.Module) -> nn.Module:
        return tensor.SharedHeads(cast(nn.Linear, module), split, config.num_kv_heads)

    def shared_norm(module: nn.Module) -> nn.Module:
        return tensor.SharedNorm(cast(nn.RMSNorm, module), split)

    def entering(module: nn.Module) -> nn.Module:
        module.register_forward_pre_hook(_enter(axis))
        return module

    kv = column if config.num_kv_heads >= axis.size else shared_heads
    plan: dict[str, object] = {
        "model.embed_tokens": lambda m: tensor.VocabEmbedding(cast(nn.Embedding, m), split),
        f"{block}.self_attn": entering,
        f"{block}.self_attn.q_proj": column,
        f"{block}.self_attn.k_proj": kv,
        f"{block}.self_attn.v_proj": kv,
        f"{block}.self_attn.o_proj": row,
        f"{block}.mlp": entering,
        f"{block}.mlp.gate_proj": column,
        f"{block}.mlp.up_proj": column,
        f"{block}.mlp.down_proj": row,
        "lm_head": lambda m: tensor.VocabHead(cast(nn.Linear, m), split),
    }
    if config.qk_norm:
        plan |= {f"{block}.self_attn.{n}_norm": shared_norm for n in ("q", "k")}
    if axis.sequence_parallel:
        names = ("input_layernorm", "post_attention_layernorm")
        plan |= {f"{block}.{name}": shared_norm for name in names}
        plan["model.norm"] = shared_norm
    return cast(Plan, plan)


def _enter(axis: Axis):
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (tensor.enter(args[0], axis), *args[1:])

    return hook


def split_decoder(
    model: Decoder,
    axis: Axis,
    plan_of: Callable[[DecoderConfig, Split], Plan] = decoder_plan,
) -> Split:
    """Split a decoder (on meta) in place; returns which part each parameter is.

    Raises: ValueError for a key that matches no module.
    """
    split = Split(axis)
    absent = set()
    if not model.part.embed:
        absent.add("model.embed_tokens")
    if not model.part.head:
        absent |= {"lm_head", "model.norm"}
    apply_plan(model, plan_of(model.config, split), absent=frozenset(absent))
    return split
