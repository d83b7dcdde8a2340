"""A decoder spread over a layout: this rank's stages, and one step of the global batch.

    decoder on meta -> tensor split -> recompute -> compile -> memory and sharding, block by block
                       (or masters, where no data rank shares a parameter)

The order matters and is kept here alone. What a step returns (loss, gradient norm, gradients) is
that of one process with the same global batch: losses are token sums over the global batch's valid
tokens, gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder, DecoderPart, initial_value
from ridgeline.parallel import clip, fsdp
from ridgeline.parallel.activations import wrap_block
from ridgeline.parallel.boxes import Box, box_of
from ridgeline.parallel.collectives import Group
from ridgeline.parallel.context import ContextPlan, local_micro_batch
from ridgeline.parallel.deferred import defer
from ridgeline.parallel.layout import Indices, samples_of_rank
from ridgeline.parallel.masters import master_of
from ridgeline.parallel.mesh import World
from ridgeline.parallel.overlap import overlap_tensor_parallel
from ridgeline.parallel.pipeline import Loop, Pipeline
from ridgeline.parallel.plans.apply import Plan
from ridgeline.parallel.plans.decoder import decoder_plan, split_decoder
from ridgeline.parallel.stage import MicroBatch, Packed, Stage
from ridgeline.parallel.stages import cut_layers
from ridgeline.parallel.tensor import Axis, Piece, Split

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a ParallelModel is built for."""

    seqlen: int
    """Tokens of a sample."""
    micro_batch_samples: int
    num_microbatches: int
    """Micro-batches of a step on each rank."""
    compute_dtype: torch.dtype = torch.float32
    """Of activations and of the parameters as the blocks see them."""
    master_dtype: torch.dtype = torch.float32
    """Of the parameters as the optimizer sees them."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None: as many as fit 64 MiB (on a GPU 1 GiB)."""


class ParallelModel:
    """This rank's part of a decoder. Parameters hold no values before init_weights or load_weights.

    Raises: ValueError for a plan key that matches no module.
    """

    def __init__(
        self,
        config: DecoderConfig,
        world: World,
        options: ModelOptions,
        plan_of: Callable[[DecoderConfig, Split], Plan] = decoder_plan,
    ) -> None:
        self.config, self.world, self.options = config, world, options
        layout = world.layout
        if layout.async_tp and (group := world.group("tp")) is not None:
            overlap_tensor_parallel(world.device, group)
        self._plan_of = plan_of
        self._axis = _axis(world)
        self._shapes = whole_shapes(config)
        self._pieces: dict[str, Piece] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._twin: nn.Parameter | None = None
        """The head's copy of a tied table whose first copy is on this rank too."""
        parts = cut_layers(config, layout.num_stages, options.seqlen)
        self.parts: tuple[DecoderPart, ...] = tuple(
            parts[index] for index in layout.stages_of(world.pp_rank)
        )
        self.stages = [self._build(part) for part in self.parts]
        self._tied_across = config.tie_embeddings and layout.num_stages > 1
        self._local = {name: self._own(parameter) for name, parameter in self._parameters.items()}
        self._twin_master = None if self._twin is None else self._own(self._twin)
        self._boxes = {name: self._box(name) for name in self._parameters}
        shares = [1.0 / box.copies for box in self._boxes.values()]
        self._shares = torch.tensor(shares, device=world.device)
        self._runner = self._make_runner()

    # ---- building ------------------------------------------------------------------------------

    def _build(self, part: DecoderPart) -> Stage:
        options, layout = self.options, self.world.layout
        alone = self.world.data_ranks == 1
        dtype = options.compute_dtype if alone else options.master_dtype
        decoder = Decoder(self.config, device="meta", dtype=dtype, part=part)
        split = None
        if self._axis is not None:
            split = split_decoder(decoder, self._axis, self._plan_of)
        for name, parameter in decoder.named_parameters():
            whole = Piece(shape=tuple(parameter.shape), dim=None)
            piece = whole if split is None else split.pieces.get(id(parameter), whole)
            self._pieces[self._canonical(name)] = piece
        width = self.config.hidden_size
        for block in decoder.blocks:
            wrap_block(
                block, layout.activation_checkpointing, width, compiled=layout.compile_blocks
            )
        queue = defer(decoder.blocks) if layout.splits_backward else None
        stage = Stage(decoder, self._axis, options.loss_chunk_tokens, queue)
        if alone:
            materialize(stage, self.world.device)
        else:
            self._shard(stage)
        for name, parameter in decoder.named_parameters():
            name = self._canonical(name)
            if name in self._parameters:
                self._twin = parameter
            else:
                self._parameters[name] = parameter
        return stage

    def _shard(self, stage: Stage) -> None:
        blocks, dtype = list(stage.decoder.blocks), self.options.compute_dtype
        for block in blocks:
            materialize(block, self.world.device)
            # The last block's backward comes next: dropping its parameters would fetch them twice.
            fsdp.shard_module(block, self.world, dtype, keep_gathered=block is blocks[-1])
        materialize(stage, self.world.device)
        fsdp.shard_module(stage, self.world, dtype, keep_gathered=True)
        fsdp.finish(stage, blocks)

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer is given for a parameter: its master, or this rank's shard of it."""
        if self.world.data_ranks == 1:
            return master_of(parameter, self.options.master_dtype)
        return nn.Parameter(fsdp.local_shard(parameter))

    def _canonical(self, name: str) -> str:
        return EMBEDDING if self.config.tie_embeddings and name == HEAD else name

    def _make_runner(self) -> Loop | Pipeline:
        layout, options = self.world.layout, self.options
        if layout.pp == 1:
            return Loop(self.stages[0], layout)
        tokens = options.micro_batch_samples * options.seqlen // layout.cp
        if layout.sequence_parallel:
            tokens //= layout.tp
        hidden = torch.empty(
            (1, tokens, self.config.hidden_size),
            dtype=options.compute_dtype,
            device=self.world.device,
            requires_grad=True,
        )
        return Pipeline(self.stages, self.world, hidden, options.num_microbatches)

    # ---- weights -------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Full names of the parameters held here."""
        return list(self._parameters)

    @property
    def all_names(self) -> list[str]:
        """Full names of the whole model's parameters, in the same order on every rank."""
        return list(self._shapes)

    def parameters_here(self) -> dict[str, nn.Parameter]:
        """This rank's parts as plain tensors that share the shards' memory; after a step their
        gradients are the reduced ones. What an optimizer is given."""
        return self._local

    def shard_of(self, name: str) -> Box:
        """Which part of the whole parameter `parameters_here()[name]` is."""
        return self._boxes[name]

    def _box(self, name: str) -> Box:
        tied = self._tied_across and name == EMBEDDING
        apart = tied and self.world.layout.schedule != "zbv"
        return box_of(
            self._pieces[name],
            self.world,
            stages=2 if apart else 1,
            owner=not tied or self._holds_embedding,
        )

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fresh weights, a function of (seed, full name): the same in every layout."""
        self.load_weights(lambda name: initial_value(self.config, name, self._shapes[name], seed))

    @torch.no_grad()
    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take every part from whole tensors: read(full name) -> the whole parameter."""
        for name, local in self._local.items():
            whole = read(name)
            assert tuple(whole.shape) == self._shapes[name], f"{name}: {tuple(whole.shape)}"
            local.copy_(self.shard_of(name).cut(whole))

    def full(self, name: str) -> torch.Tensor:
        """The whole parameter in fp32 on the CPU. A collective: all ranks, in all_names' order."""
        return self._gather(name, self._local.get(name))

    def full_gradient(self, name: str) -> torch.Tensor:
        """The whole gradient of a parameter; as `full`."""
        local = self._local.get(name)
        return self._gather(name, None if local is None else local.grad)

    @torch.no_grad()
    def _gather(self, name: str, local: torch.Tensor | None) -> torch.Tensor:
        whole = torch.zeros(self._shapes[name], device=self.world.device)
        if local is not None:
            box = self.shard_of(name)
            if box.is_owner:
                box.cut(whole).copy_(local)
        dist.all_reduce(whole)
        return whole.cpu()

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, indices: Indices) -> list[Indices]:
        """The samples of a global batch that this rank reads, one entry a micro-batch."""
        layout, options = self.world.layout, self.options
        return samples_of_rank(indices, layout, self.world.dp_rank, options.num_microbatches)

    def forward_backward(self, batches: Sequence[Packed], num_valid: int) -> torch.Tensor:
        """One step's gradients; returns the loss of the global batch on every rank.

        batches: this rank's micro-batches (ranks of one dp_rank give the same). num_valid: valid
        targets of the whole global batch.
        """
        loss = self._run(batches, max(1, num_valid), backward=True)
        for name, local in self._local.items():
            if self.world.data_ranks > 1:
                local.grad = fsdp.local_gradient(self._parameters[name])
            if local.grad is None:
                local.grad = torch.zeros_like(local)
        self._share_tied_gradient()
        return self._over_world(loss)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Packed]) -> torch.Tensor:
        """Summed loss of all ranks' batches."""
        return self._over_world(self._run(batches, 1, backward=False))

    def _run(self, batches: Sequence[Packed], denominator: int, *, backward: bool) -> torch.Tensor:
        self._refresh()
        local = [self._local_batch(batch) for batch in batches]
        for stage in self.stages:
            stage.begin(local, denominator)
        loss = self._runner.step(local, backward)
        for stage in self.stages:
            stage.end()
        return loss

    def _local_batch(self, batch: Packed) -> MicroBatch:
        if self.world.context is not None:
            plan = ContextPlan.of(batch.seqlens, self.options.seqlen, self.world)
            return local_micro_batch(batch, plan)
        return MicroBatch(
            token_ids=batch.token_ids_P[None],
            targets=batch.targets_P,
            positions=batch.position_ids_P[None],
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )

    def _over_world(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss / self.world.layout.tp  # tensor ranks all have the same
        dist.all_reduce(total)
        return total

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for local in self._local.values():
            local.grad = None
        for stage in self.stages:
            for parameter in stage.parameters():
                parameter.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Norm of the whole gradient before clipping; scales it to `max_norm` where it is above."""
        gradients = [local.grad for local in self._local.values() if local.grad is not None]
        assert len(gradients) == len(self._local), "clip comes after forward_backward"
        norm = clip.global_norm(gradients, self._shares)
        if max_norm is not None:
            clip.scale_to(gradients, norm, max_norm)
        return norm

    # ---- a tied table on two stages --------------------------------------------------------------

    @property
    def _holds_embedding(self) -> bool:
        return any(part.embed for part in self.parts)

    @property
    def _holds_head(self) -> bool:
        return any(part.head for part in self.parts)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Make anew what is a copy of the masters."""
        if self._twin is not None:
            fsdp.local_shard(self._twin).copy_(self._local[EMBEDDING])
        if self.world.data_ranks > 1 or self.options.compute_dtype == self.options.master_dtype:
            return
        copies = [parameter.detach() for parameter in self._parameters.values()]
        torch._foreach_copy_(copies, list(self._local.values()))  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def _share_tied_gradient(self) -> None:
        """Add up the gradients of a tied table's two copies, on both."""
        if not self._tied_across or not (self._holds_embedding or self._holds_head):
            return
        own = self._local[EMBEDDING].grad
        assert own is not None
        if self._twin is not None:
            holder = self._twin if self.world.data_ranks > 1 else self._twin_master
            assert holder is not None
            other = fsdp.local_gradient(holder)
            holder.grad = None
        else:
            other = torch.empty_like(own)
            group = self.world.group("pp")
            assert group is not None
            peer = dist.get_global_rank(
                group, self.world.layout.pp - 1 if self._holds_embedding else 0
            )
            operations = [
                dist.P2POp(dist.isend, own.contiguous(), peer, group),
                dist.P2POp(dist.irecv, other, peer, group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if other is not None:
            own += other


def whole_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Full name and shape of every distinct parameter."""
    model = Decoder(config, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give a module's parameters that are on meta memory, shared ones once."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                setattr(owner, name, made[id(parameter)])


def _axis(world: World) -> Axis | None:
    group = world.group("tp")
    if group is None:
        return None
    layout = world.layout
    return Axis(
        group=Group.of(group),
        rank=world.tp_rank,
        size=layout.tp,
        sequence_parallel=layout.sequence_parallel,
    )
