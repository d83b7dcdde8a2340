"""One decoder family: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2.

    tokens -> embedding -> L blocks (layers.py) -> RMSNorm -> head -> logits

Parameter names are Hugging Face's. Training and prefill run on dense rows [B, S] or on packed
documents (cu_seqlens over the flattened rows: no attention and no position crosses a document);
decoding runs through a cache. A model can hold a part of the layers (pipeline stages).
A decode step reads every weight once: it is bound by memory. Source of the architecture: Touvron
et al. 2023 (arXiv 2307.09288); Jiang et al. 2023 (2310.06825); Qwen2 (2407.10671), Qwen3
(2505.09388).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from ridgeline.core.errors import bad_value
from ridgeline.core.protocols import ScaleFold
from ridgeline.nn.cache import Cache
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.layers import Attend, Block, LayerList, Step
from ridgeline.nn.rope import cos_sin

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPart:
    """Which part of a decoder a module holds (a pipeline stage)."""

    first_layer: int
    end_layer: int
    """One past the last layer."""
    embed: bool
    head: bool
    """Final norm and vocabulary projection."""


class DecoderBody(nn.Module):
    """What Hugging Face calls `model`: embedding, layers, final norm."""

    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | None

    def __init__(self, config: DecoderConfig, part: DecoderPart, dtype: torch.dtype) -> None:
        super().__init__()
        C = config.hidden_size
        self.embed_tokens = None
        if part.embed:
            # Given its weight it is not filled: filling one on meta imports all of torch._dynamo.
            table = torch.empty(config.vocab_size, C, device=META, dtype=dtype)
            self.embed_tokens = nn.Embedding(config.vocab_size, C, _weight=table)
        self.layers = LayerList(
            {
                layer: Block(config, layer, META, dtype)
                for layer in range(part.first_layer, part.end_layer)
            }
        )
        self.norm = nn.RMSNorm(C, config.norm_eps, device=META, dtype=dtype) if part.head else None


class Decoder(nn.Module):
    """A decoder with fresh weights on `device` (on "meta": shapes only, weights assigned later).

    Fresh weights depend on (seed, parameter name) alone: the same in any layout and part.
    """

    lm_head: nn.Linear | None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        part: DecoderPart | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.part = part or DecoderPart(
            first_layer=0, end_layer=config.num_layers, embed=True, head=True
        )
        self.model = DecoderBody(config, self.part, dtype)
        self.lm_head = None
        if self.part.head:
            C, V = config.hidden_size, config.vocab_size
            self.lm_head = nn.Linear(C, V, bias=False, device=META, dtype=dtype)
        self.tie_weights()
        if torch.device(device) != META:
            self.materialize(device)
            self.reset_parameters(seed)

    # ---- weights ---------------------------------------------------------------------------

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter here (a stage with one has its own)."""
        return self.config.tie_embeddings and self.part.embed and self.part.head

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's where the config says so; call it after replacing
        parameters."""
        if self.tied and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def materialize(self, device: torch.device | str) -> None:
        """Give every parameter and buffer that is on meta uninitialised memory on `device`."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    empty = torch.empty_like(parameter, device=device)
                    setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    setattr(module, name, torch.empty_like(buffer, device=device))
        self.tie_weights()

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fill every parameter with its fresh value."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.config, name, tuple(parameter.shape), seed))

    # ---- forward ---------------------------------------------------------------------------

    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | None = None,
        last_tokens: int | None = None,
    ) -> torch.Tensor:
        """Logits of a causal pass.

        Shapes: token_ids int64 [B, S] (a later pipeline stage: hidden states [B, S, C]); positions
        int64 [S] or [B, S], default 0 .. S-1 or the restart at each document; cu_seqlens int32
        [documents + 1] over the flattened B * S tokens, max_seqlen the longest document (without it
        the device is asked: a sync). last_tokens: logits of the last so many positions only.
        Returns [B, S, V] (a stage without a head: hidden states [B, S, C]).
        Raises: ValueError for a sequence longer than the model's context, cu_seqlens with a cache.
        """
        x_BSC = self.hidden(
            token_ids,
            positions=positions,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            cache=cache,
        )
        if self.lm_head is None:
            return x_BSC
        return self.head(x_BSC if last_tokens is None else x_BSC[:, -last_tokens:])

    def hidden(
        self,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """Hidden states before the final norm, [B, S, C]; arguments as `forward`. With `head` on
        slices of it, a loss never holds all logits. attend: what attends instead of the blocks
        (context parallel; positions are given then)."""
        x_BSC = self.embed(token_ids) if self.model.embed_tokens is not None else token_ids
        B, S = x_BSC.shape[:2]
        if cu_seqlens is not None:
            if cache is not None:
                raise bad_value("decoder", "cu_seqlens", "be None with a cache", "both", "drop one")
            if max_seqlen is None:
                max_seqlen = int(cu_seqlens.diff().max())
            if positions is None:
                positions = packed_positions(cu_seqlens, B * S).unflatten(0, (B, S))
        elif cache is not None and positions is None:
            positions = cache.positions(S)
        elif positions is None:
            positions = torch.arange(S, device=x_BSC.device)
        self._check_length(S if max_seqlen is None else max_seqlen)
        step = self._step(positions, cu_seqlens, max_seqlen or 0, cache, attend)
        for block in self.model.layers:
            x_BSC = block(x_BSC, step)
        if cache is not None:
            cache.advance(S)
        return x_BSC

    def _step(
        self,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int = 0,
        cache: Cache | None = None,
        attend: Attend | None = None,
    ) -> Step:
        if positions.dim() == 1:
            positions = positions.unsqueeze(0)
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, positions)
        return Step(
            cos=cos,
            sin=sin,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            cache=cache,
            attend=attend,
        )

    def _check_length(self, seqlen: int) -> None:
        if seqlen > self.config.max_seqlen:
            raise bad_value(
                "decoder",
                "sequence",
                f"be at most {self.config.max_seqlen} tokens, the model's context",
                seqlen,
                "shorten it or split it into windows",
            )

    # ---- block by block (core.protocols.BlockwiseModel) ---------------------------------------

    @property
    def blocks(self) -> LayerList:
        """The decoder blocks held here, under their global layer index."""
        return self.model.layers

    def block_prefix(self, index: int) -> str:
        """Full parameter-name prefix of a block: "model.layers.3"."""
        return f"model.layers.{index}"

    def linear_groups(self) -> list[list[str]]:
        """Linears of a block that share one input, in data-flow order."""
        return [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] -> hidden states [B, S, C]."""
        assert self.model.embed_tokens is not None, "this stage holds no embedding"
        return self.model.embed_tokens(token_ids)

    def run_block(
        self, index: int, x_BSC: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One block over full causal sequences starting at position 0; cu_seqlens: int32 starts of
        packed sequences in the flattened tokens."""
        B, S = x_BSC.shape[:2]
        if cu_seqlens is None:
            self._check_length(S)
            step = self._step(torch.arange(S, device=x_BSC.device))
        else:
            longest = int(cu_seqlens.diff().max())
            self._check_length(longest)
            positions = packed_positions(cu_seqlens, B * S).unflatten(0, (B, S))
            step = self._step(positions, cu_seqlens, longest)
        return self.model.layers[index](x_BSC, step)

    def scale_folds(self) -> list[ScaleFold]:
        """Where the input channels of a block's linears can be scaled at no cost."""
        attention, mlp = "self_attn", "mlp"
        return [
            ScaleFold(
                producer="input_layernorm",
                consumers=tuple(f"{attention}.{name}_proj" for name in "qkv"),
                parent=attention,
                mixes_positions=True,
                norm="w",
            ),
            ScaleFold(
                producer=f"{attention}.v_proj",
                consumers=(f"{attention}.o_proj",),
                run=self.config.head_dim,
                repeats=self.config.num_heads // self.config.num_kv_heads,
            ),
            ScaleFold(
                producer="post_attention_layernorm",
                consumers=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                parent=mlp,
                norm="w",
            ),
            ScaleFold(producer=f"{mlp}.up_proj", consumers=(f"{mlp}.down_proj",)),
        ]

    def bilinear(self) -> tuple[str, ...]:
        """Linears whose outputs are multiplied with each other."""
        return ("self_attn.q_proj", "self_attn.k_proj")

    def head(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Final norm and vocabulary projection -> logits [B, S, V]."""
        assert self.lm_head is not None and self.model.norm is not None, "this stage holds no head"
        return self.lm_head(self.model.norm(x_BSC))

    def head_input(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """What the vocabulary projection is applied to."""
        assert self.model.norm is not None, "this stage holds no head"
        return self.model.norm(x_BSC)

    def head_linear(self) -> nn.Linear:
        """The vocabulary projection, with a weight of its own: a tied one is copied first."""
        assert self.lm_head is not None, "this stage holds no head"
        table = self.model.embed_tokens
        if table is not None and self.lm_head.weight is table.weight:
            own = self.lm_head.weight.detach().clone()
            self.lm_head.weight = nn.Parameter(own, self.lm_head.weight.requires_grad)
        return self.lm_head

    # ---- counting --------------------------------------------------------------------------

    def num_params(self) -> int:
        """Distinct parameters of the whole model, quantized or not."""
        return self.config.num_params()

    def flops_per_token(self, seqlen: int, *, causal: bool = True, backward: bool = True) -> float:
        """DecoderConfig.flops_per_token: for MFU under either counting."""
        return self.config.flops_per_token(seqlen, causal=causal, backward=backward)

    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: everything but an untied lookup table.

        A replaced linear that keeps more than one form of its weight says with a method
        `read_bytes()`, else `weight_bytes()`, what a step of one token reads.
        """
        return sum(tensor_bytes for _, tensor_bytes in self._weights_read())

    def bytes_per_token(self, context_tokens: int = 0) -> int:
        """Bytes that one decode step of one sequence reads: weights and that many cached tokens."""
        assert self.model.norm is not None, "this stage holds no head"
        itemsize = self.model.norm.weight.element_size()
        return self.weight_bytes() + context_tokens * self.config.kv_bytes_per_token(itemsize)

    def _weights_read(self) -> list[tuple[str, int]]:
        counted: set[int] = set()
        own_answer: list[str] = []
        found: list[tuple[str, int]] = []
        for name, module in self.named_modules():
            if any(name.startswith(prefix + ".") for prefix in own_answer):
                continue
            answer = getattr(module, "read_bytes", None) or getattr(module, "weight_bytes", None)
            if module is not self and callable(answer):
                own_answer.append(name)
                found.append((name, int(answer())))  # pyright: ignore[reportArgumentType]
                continue
            if module is self.model.embed_tokens:
                continue  # one row is read; a tied table is counted at the head
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            for tensor in tensors:
                if id(tensor) not in counted:
                    counted.add(id(tensor))
                    found.append((name, tensor.numel() * tensor.element_size()))
        return found


def packed_positions(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Position of each packed token in its document, int64 [P]."""
    starts = torch.repeat_interleave(
        cu_seqlens[:-1].long(), cu_seqlens.diff().long(), output_size=num_tokens
    )
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


def initial_value(
    config: DecoderConfig, name: str, shape: tuple[int, ...], seed: int
) -> torch.Tensor:
    """Fresh value of the whole parameter `name`, fp32 on the CPU: a function of (seed, name).

    Norms 1, biases 0, matrices normal with init_std; those that write to the residual stream are
    scaled by 1 / sqrt(2 L), so that its variance does not grow with depth (Radford et al. 2019).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    std = config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * config.num_layers) ** 0.5
    if config.tie_embeddings and name == "lm_head.weight":
        name = "model.embed_tokens.weight"  # the last stage's copy of a tied table
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
