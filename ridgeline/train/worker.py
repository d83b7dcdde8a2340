"""What a rank does of a step: the whole model in one process, or its share of a layout.

The loop (trainer.py) is the same for both. A worker knows parameters, gradients and their
optimizer; the loop knows data, schedule, metrics and checkpoints.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from ridgeline.core.dtypes import torch_dtype
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_pretrained, open_weights, state_tensors
from ridgeline.parallel.activations import wrap_block
from ridgeline.parallel.loss import linear_cross_entropy
from ridgeline.parallel.mesh import build_world
from ridgeline.parallel.model import ModelOptions, ParallelModel
from ridgeline.parallel.storage import Piece, whole_piece
from ridgeline.train.config import TrainConfig
from ridgeline.train.data import IGNORE, PackedBatch, PackedSamples
from ridgeline.train.optim import PartOptimizer, clip_gradients
from ridgeline.train.stop import StopRequest


class Worker(Protocol):
    """This process's share of the model and of a step."""

    shape: DecoderConfig
    optimizer: PartOptimizer
    data_seconds: float
    """Time spent on making batches since it was last set to 0."""

    def forward_backward(
        self, samples: PackedSamples, indices: np.ndarray, num_valid: int, stop: StopRequest
    ) -> torch.Tensor | None:
        """Gradients and loss of a global batch; None where it was abandoned for a stop."""
        ...

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Scale the gradients; returns their norm before."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def loss_sum(self, samples: PackedSamples, indices: np.ndarray) -> float:
        """Summed loss of some samples, no gradients."""
        ...

    def pieces(self) -> dict[str, Piece]:
        """The fp32 masters held here, as boxes of whole parameters."""
        ...

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the model in the run's dtype, one at a time; a collective call of
        which rank 0 gets the tensors."""
        ...


_NO_SAMPLE = -1


def _batch_of(samples: PackedSamples, indices: np.ndarray) -> PackedBatch:
    """A batch; in the place of a _NO_SAMPLE stands a sample without targets."""
    batch = samples.batch(np.maximum(indices, 0))
    empty = torch.from_numpy(indices == _NO_SAMPLE)
    if not empty.any():
        return batch
    targets_P = batch.targets_P.view(len(indices), -1).clone()
    targets_P[empty] = IGNORE
    targets_P = targets_P.flatten()
    num_valid = int((targets_P != IGNORE).sum())
    return dataclasses.replace(batch, targets_P=targets_P, num_valid=num_valid)


class OneProcess:
    """The whole model in this process."""

    def __init__(self, config: TrainConfig, shape: DecoderConfig, device: torch.device) -> None:
        self.config, self.shape, self.device = config, shape, device
        self.data_seconds = 0.0
        dtype = torch_dtype(config.dtype)
        if config.model.init == "weights":
            assert config.model.folder is not None
            self.model = load_pretrained(config.model.folder, dtype=dtype, device=device)
        else:
            self.model = Decoder(shape, device=device, dtype=dtype, seed=config.seed)
        layout = config.layout
        for block in self.model.blocks:
            wrap_block(
                block,
                layout.activation_checkpointing,
                shape.hidden_size,
                compiled=layout.compile_blocks,
            )
        self.optimizer = PartOptimizer(self.model.named_parameters(), config.optim)

    def forward_backward(
        self, samples: PackedSamples, indices: np.ndarray, num_valid: int, stop: StopRequest
    ) -> torch.Tensor | None:
        """As Worker."""
        loss = torch.zeros((), device=self.device)
        size = self.config.samples_at_once
        for start in range(0, len(indices), size):
            if stop.reason is not None:
                self.optimizer.zero_grad()
                return None
            loss_sum = self._loss_sum(self._batch(samples, indices[start : start + size]))
            loss_sum = loss_sum / num_valid
            loss_sum.backward()
            loss += loss_sum.detach()
        return loss

    def _batch(self, samples: PackedSamples, indices: np.ndarray) -> PackedBatch:
        start = time.perf_counter()
        batch = samples.batch(indices).to(self.device)
        self.data_seconds += time.perf_counter() - start
        return batch

    def _loss_sum(self, batch: PackedBatch) -> torch.Tensor:
        """Summed loss of a packed batch; only a chunk's logits exist at once."""
        shape = (-1, self.config.data.seqlen)
        x_BSC = self.model.hidden(
            batch.token_ids_P.view(shape),
            positions=batch.position_ids_P.view(shape),
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
        assert self.model.model.norm is not None and self.model.lm_head is not None
        x_PC = self.model.model.norm(x_BSC).flatten(0, 1)
        weight_VC = self.model.lm_head.weight
        chunk = self.config.loss_chunk_tokens
        return linear_cross_entropy(x_PC, weight_VC, batch.targets_P, chunk=chunk)[0]

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """As Worker."""
        return clip_gradients([self.optimizer], max_norm)

    def zero_grad(self) -> None:
        """As Worker."""
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss_sum(self, samples: PackedSamples, indices: np.ndarray) -> float:
        """As Worker."""
        total, size = 0.0, self.config.samples_at_once
        for start in range(0, len(indices), size):
            batch = samples.batch(indices[start : start + size]).to(self.device)
            total += self._loss_sum(batch).item()
        return total

    def pieces(self) -> dict[str, Piece]:
        """As Worker."""
        return {name: whole_piece(master) for name, master in self.optimizer.masters.items()}

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As Worker."""
        return iter(state_tensors(self.model).items())


class ManyProcesses:
    """This rank's share of a layout."""

    def __init__(self, config: TrainConfig, shape: DecoderConfig, device: torch.device) -> None:
        self.config, self.shape, self.device = config, shape, device
        self.data_seconds = 0.0
        options = ModelOptions(
            seqlen=config.data.seqlen,
            micro_batch_samples=config.samples_at_once,
            num_microbatches=config.num_micro_batches,
            compute_dtype=torch_dtype(config.dtype),
            loss_chunk_tokens=config.loss_chunk_tokens,
        )
        self.model = ParallelModel(shape, build_world(config.layout, device), options)
        if config.model.init == "weights":
            assert config.model.folder is not None
            self.model.load_weights(open_weights(config.model.folder, shape).get)
        else:
            self.model.init_weights(config.seed)
        self.optimizer = PartOptimizer(self.model.parameters_here().items(), config.optim)

    def _batches(self, samples: PackedSamples, indices: np.ndarray) -> list[PackedBatch]:
        start = time.perf_counter()
        own = self.model.micro_batches(indices)  # pyright: ignore[reportArgumentType]
        batches = [_batch_of(samples, each).to(self.device) for each in own]
        self.data_seconds += time.perf_counter() - start
        return batches

    def forward_backward(
        self, samples: PackedSamples, indices: np.ndarray, num_valid: int, stop: StopRequest
    ) -> torch.Tensor | None:
        """As Worker; never abandoned, since all ranks would have to agree in mid-step."""
        return self.model.forward_backward(self._batches(samples, indices), num_valid)

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """As Worker."""
        return self.model.clip(max_norm)

    def zero_grad(self) -> None:
        """As Worker."""
        self.optimizer.zero_grad()
        self.model.zero_grad()

    @torch.no_grad()
    def loss_sum(self, samples: PackedSamples, indices: np.ndarray) -> float:
        """As Worker; the last batch is filled up with samples that do not count."""
        size = self.config.batch_samples
        total, padding = 0.0, np.full(-len(indices) % size, _NO_SAMPLE)
        filled = np.concatenate([indices, padding])
        for start in range(0, len(filled), size):
            batches = self._batches(samples, filled[start : start + size])
            total += self.model.evaluate(batches).item()
        return total

    def pieces(self) -> dict[str, Piece]:
        """As Worker."""
        found: dict[str, Piece] = {}
        for name, master in self.optimizer.masters.items():
            box = self.model.shard_of(name)
            found[name] = Piece(
                tensor=master.detach(), offsets=tuple(box.offsets), shape=tuple(box.global_shape)
            )
        return found

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As Worker."""
        dtype = torch_dtype(self.config.dtype)
        for name in self.model.all_names:
            yield name, self.model.full(name).to(dtype)
