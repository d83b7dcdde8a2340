"""The forward on a GPU with the small operations fused: nine kernels a layer around the attention
and the matmuls instead of two dozen, each of them launch-bound at decode sizes.

    y = norm(x += delta) ; q, cache = rotate(qkv) ; o = attention ; delta = out o
    y = norm(x += delta) ; delta = down(silu(gate) up)

The same numbers as forward.py's, rounded at the same places (kernels/step). A step of few single
tokens can go further: rotation, cache and attention are one kernel (joined), and of one row with
plain weights norm, matmul and gate are (RowForward). Either can be overlapped (Hopper and later):
a kernel starts while the one before it ends, and the next matmul's weights come meanwhile. Which
way is fastest is measured where it runs (graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F

from ridgeline.engine.forward import Attend, Forward
from ridgeline.engine.paged import FP8, DeviceAttention
from ridgeline.engine.weights import Dense, LayerWeights, Linear
from ridgeline.kernels.step.op import asked, for_tensor, joined, overlapped
from ridgeline.kernels.step.ref import DecodeTable

PARTS = ("qkv", "out", "gate_up", "down", "head")
"""Of a row's kernels, those that read weights; the first four as LayerWeights.linears()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How much of the weights to come the kernels between matmuls ask for, in MiB a layer: their
    bytes are brought to the L2 cache while the memory idles (kernels/step/triton_ask.py)."""

    before_qkv: float = 0.0
    """Of qkv, by the norm before it."""
    attention: float = 0.0
    """Of the projection after the attention, then of gate and up, by the attention."""
    before_gate_up: float = 0.0
    """Of gate and up, behind what the attention asked for, by the norm before them."""
    piece: int = 512
    """Bytes a request."""

    def __str__(self) -> str:
        sizes = (self.before_qkv, self.attention, self.before_gate_up)
        return "asking " + "+".join(f"{size:g}" for size in sizes) + f" MiB by {self.piece}"

    def of(self, layer: LayerWeights) -> dict[str, Any]:
        """What each kernel of a layer asks for, by its place."""
        mib = 2**20
        after, left = first_bytes(layer.out.streams(), 0, self.attention * mib)
        more, _ = first_bytes(layer.gate_up.streams(), 0, left)
        skip = sum(part.numel() for part in more)
        rest, _ = first_bytes(layer.gate_up.streams(), skip, self.before_gate_up * mib)
        before, _ = first_bytes(layer.qkv.streams(), 0, self.before_qkv * mib)
        places = {"qkv": before, "attention": after + more, "gate_up": rest}
        return {name: asked(parts, self.piece) for name, parts in places.items() if parts}


ASKINGS = (
    Asking(before_gate_up=24),
    Asking(before_gate_up=40),
    Asking(attention=9, before_gate_up=24),
    Asking(attention=9, before_gate_up=40),
)
"""What is tried when a step is recorded (graphs.py)."""


def first_bytes(
    tensors: Sequence[torch.Tensor], skip: float, count: float
) -> tuple[list[torch.Tensor], float]:
    """(`count` bytes of tensors that are read side by side, after `skip`: a share of each, as
    bytes; how many were wanted beyond them)."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    total = sum(part.numel() for part in flat)
    start, stop = (min(1.0, place / total) for place in (skip, skip + count))

    def at(part: torch.Tensor, share: float) -> int:
        return int(part.numel() * share) // 128 * 128

    cut = [part[at(part, start) : at(part, stop)] for part in flat]
    return [part for part in cut if part.numel()], max(0.0, skip + count - total)


class DeviceForward(Forward):
    """Forward, fused where the step's attention is over pages in place."""

    overlaps = False
    asks: tuple[dict[str, Any], ...] = ()
    """What each layer's kernels ask for early."""
    head_config: Any = None
    """Of the one-row kernel that computes a single row's logits; None: the general matmul."""

    def overlapped(self) -> Self:
        """The same step by kernels that start while the previous one ends."""
        made = copy(self)
        made.overlaps = True
        return made

    def joining(self, sequences: int, config: Any = None) -> Self:
        """The same step of at most so many single tokens, attention as one kernel; config: that
        kernel's."""
        weights, made = self.weights, copy(self)
        heads = (weights.heads, weights.kv_heads, weights.config.head_dim)
        options = {"overlap": self.overlaps, "config": config}
        made.joined = joined(heads, sequences, weights.device, **options)
        return made

    def asking(self, how: Asking) -> Self:
        """The same overlapped step, its small kernels asking for weights to come."""
        assert self.overlaps
        made = copy(self)
        made.asks = tuple(how.of(layer) for layer in self.weights.layers)
        return made

    def with_head(self, config: Any) -> Self:
        """The same step of one row, the head by the kernel of one row."""
        made = copy(self)
        made.head_config = replace(config, overlap=self.overlaps)
        return made

    def _asked(self, index: int, place: str) -> dict[str, Any]:
        """The option of a kernel that asks."""
        found = self.asks[index].get(place) if self.asks else None
        return {} if found is None else {"asked": found}

    def small(self, like: torch.Tensor) -> Any:
        """The fused operations beside the matmuls, for a device."""
        return overlapped() if self.overlaps else for_tensor(like)

    def hidden(
        self, token_ids_P: torch.Tensor, positions_P: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states before the final norm, [P, C]."""
        if not isinstance(attend, DeviceAttention) or attend.cache.dtype == FP8:
            return super().hidden(token_ids_P, positions_P, attend)
        x_PC, delta = self._layers(token_ids_P, positions_P, attend)
        return x_PC if delta is None else x_PC + delta

    def decode(
        self, token_ids_B: torch.Tensor, positions_B: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits of a step of single tokens, [B, V]."""
        if not isinstance(attend, DeviceAttention) or attend.cache.dtype == FP8:
            return super().decode(token_ids_B, positions_B, attend)
        x_BC, delta = self._layers(token_ids_B, positions_B, attend)
        weights, eps = self.weights, self.weights.config.norm_eps
        return self._head(self.small(x_BC).add_rms_norm(x_BC, delta, weights.norm, eps))

    def normed(self, x_RC: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        if not self.overlaps:
            return super().normed(x_RC)
        weights = self.weights
        return overlapped().add_rms_norm(x_RC, None, weights.norm, weights.config.norm_eps)

    def _layers(
        self, token_ids_P: torch.Tensor, positions_P: torch.Tensor, attend: DeviceAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the residual, what is still to be added to it) after the last layer."""
        weights, eps = self.weights, self.weights.config.norm_eps
        x_PC, y_PC = self._first(token_ids_P)
        step = self.small(x_PC)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if index:
                early = self._asked(index, "qkv")
                y_PC = step.add_rms_norm(x_PC, delta, layer.input_norm, eps, **early)
            o_PHD = self._attended(index, layer, layer.qkv(y_PC), positions_P, attend)
            delta = self._summed(layer.out(o_PHD.flatten(1)))
            early = self._asked(index, "gate_up")
            y_PC = step.add_rms_norm(x_PC, delta, layer.mlp_norm, eps, **early)
            both = layer.gate_up(y_PC)
            delta = self._summed(layer.down(both if layer.gated else step.silu_mul(both)))
        return x_PC, delta

    def _first(self, token_ids_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings, and their norm for the first layer."""
        weights, eps = self.weights, self.weights.config.norm_eps
        norm = weights.layers[0].input_norm
        if self.joined is not None:
            return self.joined.embed_norm(token_ids_P, weights.embedding_VC, norm, eps)
        x_PC = F.embedding(token_ids_P, weights.embedding_VC)
        return x_PC, self.small(x_PC).add_rms_norm(x_PC, None, norm, eps)

    def _head(self, y_RC: torch.Tensor) -> torch.Tensor:
        if self.head_config is None:
            return self.weights.head.wide(y_RC)
        head, options = self.weights.head.weight_NK, {"config": self.head_config}
        return for_tensor(y_RC).row_linear(y_RC, head, dtype=torch.float32, **options)

    def _attended(
        self,
        index: int,
        layer: LayerWeights,
        qkv_PK: torch.Tensor,
        positions_P: torch.Tensor,
        attend: DeviceAttention,
    ) -> torch.Tensor:
        """Attention of a layer's queries, [P, H, D]."""
        if self.joined is None:
            q_PHD = self._rotated(index, layer, qkv_PK, positions_P, attend)
            return attend.read(index, q_PHD, layer.window)
        weights, cache, batch = self.weights, attend.cache, attend.batch
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, weights.config.norm_eps)
        return self.joined.decode_attention(
            qkv_PK.view(-1, weights.heads + 2 * weights.kv_heads, weights.config.head_dim),
            (self.rotary.cos_T1D, self.rotary.sin_T1D),
            (cache.flat_k[index], cache.flat_v[index]),
            DecodeTable(batch.decode_seqlens_B, batch.decode_table_BU, cache.page_tokens),
            norms=norms,
            window=layer.window,
            **self._asked(index, "attention"),
        )

    def _rotated(
        self,
        index: int,
        layer: LayerWeights,
        qkv_PK: torch.Tensor,
        positions_P: torch.Tensor,
        attend: DeviceAttention,
    ) -> torch.Tensor:
        """Rotated queries; keys and values go to the cache."""
        weights, cache = self.weights, attend.cache
        H, G, D = weights.heads, weights.kv_heads, weights.config.head_dim
        qkv_PHD = qkv_PK.view(-1, H + 2 * G, D)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = weights.config.norm_eps
            q = F.rms_norm(qkv_PHD[:, :H], (D,), layer.q_norm, eps)
            k = F.rms_norm(qkv_PHD[:, H : H + G], (D,), layer.k_norm, eps)
            qkv_PHD = torch.cat((q, k, qkv_PHD[:, H + G :]), dim=1)
        return self.small(qkv_PHD).rope_append(
            qkv_PHD,
            H,
            (self.rotary.cos_T1D, self.rotary.sin_T1D),
            positions_P,
            attend.batch.slots_P,
            (cache.flat_k[index], cache.flat_v[index]),
        )


class RowForward(DeviceForward):
    """One decoding row of a model with plain weights: five kernels a layer beside the attention."""

    configs: Mapping[str, Any] = {}
    """How the kernels that read weights go over them, where not by default."""

    @classmethod
    def of(cls, forward: Forward) -> RowForward | None:
        """That of a forward's weights; None where they are not plain, or split over ranks."""
        weights = forward.weights
        linears = [linear for layer in weights.layers for linear in layer.linears()]
        plain = all(isinstance(each, Dense) and not each.invariant for each in linears)
        if not plain or weights.shard.ranks > 1:
            return None
        made = cls.__new__(cls)
        made.__dict__.update(forward.__dict__)
        return made

    def with_configs(self, configs: Mapping[str, Any], *, overlap: bool) -> RowForward:
        """By other configs, overlapped or not."""
        made = copy(self)
        made.overlaps = overlap
        made.configs = {name: replace(c, overlap=overlap) for name, c in configs.items()}
        return made

    def calls(self, name: str, config: Any) -> Callable[[], None]:
        """A linear's kernel on every layer's weights, on rows of zeros: what is timed."""
        weights, eps = self.weights, self.weights.config.norm_eps
        step = for_tensor(weights.embedding_VC)
        if name == "head":
            linears = [(weights.head, weights.norm)]
        else:
            place = PARTS.index(name)
            linears = [
                (layer.linears()[place], layer.mlp_norm if name == "gate_up" else layer.input_norm)
                for layer in weights.layers
            ]
        row = torch.zeros_like(_dense(linears[0][0]).weight_NK[:1])

        def run() -> None:
            for linear, norm in linears:
                dense = _dense(linear)
                if name in ("qkv", "gate_up"):
                    step.norm_linear(
                        row, row, norm, eps, dense.weight_NK, dense.bias_N,
                        gated=name == "gate_up", config=config,
                    )  # fmt: skip
                else:
                    wide = torch.float32 if name == "head" else None
                    step.row_linear(row, dense.weight_NK, dense.bias_N, dtype=wide, config=config)

        return run

    def _layers(
        self, token_ids_P: torch.Tensor, positions_P: torch.Tensor, attend: DeviceAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the residual, what is still to be added to it) after the last layer."""
        weights, eps = self.weights, self.weights.config.norm_eps
        x_1C = F.embedding(token_ids_P, weights.embedding_VC)
        step, own = for_tensor(x_1C), self._options
        delta: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            qkv, out, gate_up, down = (_dense(linear) for linear in layer.linears())
            x_1C, qkv_1K = step.norm_linear(
                x_1C, delta, layer.input_norm, eps, qkv.weight_NK, qkv.bias_N, **own("qkv")
            )
            o_1HD = self._attended(index, layer, qkv_1K, positions_P, attend)
            delta = step.row_linear(o_1HD.flatten(1), out.weight_NK, out.bias_N, **own("out"))
            x_1C, gated_1F = step.norm_linear(
                x_1C,
                delta,
                layer.mlp_norm,
                eps,
                gate_up.weight_NK,
                gate_up.bias_N,
                gated=True,
                **own("gate_up"),
            )
            delta = step.row_linear(gated_1F, down.weight_NK, down.bias_N, **own("down"))
        return x_1C, delta

    def logits(self, x_RC: torch.Tensor, wide_rows: Sequence[int] = ()) -> torch.Tensor:
        """Logits of one hidden state, fp32 [1, V]."""
        del wide_rows
        weights, eps = self.weights, self.weights.config.norm_eps
        return self._head(self.small(x_RC).add_rms_norm(x_RC, None, weights.norm, eps))

    def _head(self, y_RC: torch.Tensor) -> torch.Tensor:
        head = self.weights.head.weight_NK
        return for_tensor(y_RC).row_linear(y_RC, head, dtype=torch.float32, **self._options("head"))

    def _options(self, name: str) -> dict[str, Any]:
        return {"config": self.configs[name]} if name in self.configs else {}


def _dense(linear: Linear) -> Dense:
    assert isinstance(linear, Dense)
    return linear
