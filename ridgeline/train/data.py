"""Packed samples: fixed numbers of tokens cut from joined documents, which never see each other.

The documents' tokens stand one after another; sample i is tokens [i S, (i + 1) S) of that stream.
In it every document (or the part of one that falls inside) is a sequence of its own for the
attention (cu_seqlens) with positions from 0. The target of a token is the next token of its
document, also where that lies in the next sample; the last token of a document has none (IGNORE).
What is left of the stream after the last whole sample is not used. Order: order.py, one integer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ridgeline.core.errors import UserError
from ridgeline.parallel.loss import IGNORE
from ridgeline.train.config import DataConfig
from ridgeline.train.documents import DocumentRule
from ridgeline.train.order import mix64, sample_order
from ridgeline.train.tokens import TextTokenizer, TokenStore, cache_folder, tokenize_files


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Some samples as one packed sequence of P tokens."""

    token_ids_P: torch.Tensor
    """int64."""
    targets_P: torch.Tensor
    """int64, IGNORE where there is none."""
    position_ids_P: torch.Tensor
    """int64, from 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32 [sequences + 1], starts of sequences."""
    max_seqlen: int
    """Tokens of the longest sequence (host integer: no sync)."""
    num_valid: int
    """Targets that are not IGNORE (host integer)."""
    seqlens: tuple[int, ...]
    """Tokens of each sequence (host integers, for counting FLOPs)."""

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return PackedBatch(
            token_ids_P=move(self.token_ids_P),
            targets_P=move(self.targets_P),
            position_ids_P=move(self.position_ids_P),
            cu_seqlens=move(self.cu_seqlens),
            max_seqlen=self.max_seqlen,
            num_valid=self.num_valid,
            seqlens=self.seqlens,
        )


class PackedSamples:
    """Samples of `seqlen` tokens cut from some documents of a store, by index.

    Raises: UserError where the documents are shorter than one sample.
    """

    def __init__(
        self, store: TokenStore, documents: np.ndarray, seqlen: int, what: str = "training"
    ):
        self._store = store
        self._starts = store.offsets[documents]
        lengths = store.offsets[documents + 1] - self._starts
        self._ends = np.cumsum(lengths)
        self.seqlen = seqlen
        self.num_tokens = int(self._ends[-1]) if len(documents) else 0
        self.num_samples = self.num_tokens // seqlen
        if self.num_samples < 1:
            instead = ", or data.eval_fraction = 0" if what == "evaluation" else ""
            raise UserError(
                f"data: the {what} text has {self.num_tokens} tokens, too short for one sample of "
                f"{seqlen}; give more text or a smaller data.seqlen{instead}"
            )

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Parts of documents in [start, stop) of the stream: (place in the store, length, ends
        here)."""
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[document])
            begin = end - (int(self._length(document)))
            taken = min(stop, end) - start
            yield int(self._starts[document]) + start - begin, taken, start + taken == end
            start += taken
            document += 1

    def _length(self, document: int) -> int:
        return int(self._ends[document]) - (int(self._ends[document - 1]) if document else 0)

    def num_valid(self, indices: Sequence[int] | np.ndarray) -> int:
        """Targets that are not IGNORE in some samples, from the offsets alone: every rank can count
        the global batch's without communication."""
        first = np.asarray(indices, dtype=np.int64) * self.seqlen
        last_tokens = self._ends - 1
        ended = np.searchsorted(last_tokens, first + self.seqlen) - np.searchsorted(
            last_tokens, first
        )
        return int(len(first) * self.seqlen - ended.sum())

    def seqlens(self, indices: Sequence[int] | np.ndarray) -> list[int]:
        """Tokens of each sequence in some samples, from the offsets alone."""
        return [
            length
            for index in indices
            for _, length, _ in self._pieces(
                int(index) * self.seqlen, (int(index) + 1) * self.seqlen
            )
        ]

    def batch(self, indices: Sequence[int] | np.ndarray) -> PackedBatch:
        """The samples of these indices, packed in that order."""
        tokens: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        seqlens: list[int] = []
        for index in indices:
            start = int(index) * self.seqlen
            for place, length, ends in self._pieces(start, start + self.seqlen):
                ids = self._store.tokens[place : place + length + (not ends)].astype(np.int64)
                tokens.append(ids[:length])
                targets.append(np.append(ids[1:], IGNORE) if ends else ids[1:])
                seqlens.append(length)
        cu_seqlens = np.zeros(len(seqlens) + 1, dtype=np.int32)
        np.cumsum(seqlens, out=cu_seqlens[1:])
        targets_P = np.concatenate(targets)
        return PackedBatch(
            token_ids_P=torch.from_numpy(np.concatenate(tokens)),
            targets_P=torch.from_numpy(targets_P),
            position_ids_P=torch.from_numpy(
                np.concatenate([np.arange(n, dtype=np.int64) for n in seqlens])
            ),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=max(seqlens),
            num_valid=int((targets_P != IGNORE).sum()),
            seqlens=tuple(seqlens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """What a run reads: training samples in a seeded order, and samples to evaluate on."""

    train: PackedSamples
    evaluation: PackedSamples | None
    seed: int
    fingerprint: str
    """16 hex digits a text; a resumed run must find the same."""

    def order(self, consumed: int, count: int) -> np.ndarray:
        """Indices of the next `count` training samples after `consumed`."""
        return sample_order(consumed, count, num_samples=self.train.num_samples, seed=self.seed)


def evaluation_documents(num_documents: int, fraction: float) -> np.ndarray:
    """Which documents are kept for evaluation: those whose index hashes lowest (no seed: the same
    in every run). Returns a mask [documents]."""
    mask = np.zeros(num_documents, dtype=bool)
    if fraction > 0.0:
        kept = min(max(1, round(fraction * num_documents)), num_documents - 1)
        ranks = np.argsort(mix64(np.arange(num_documents, dtype=np.uint64)), kind="stable")
        mask[ranks[:kept]] = True
    return mask


def load_data(config: DataConfig, tokenizer: TextTokenizer, seed: int) -> TrainingData:
    """Tokenize (or find in the cache) a config's text and cut it into samples.

    Raises: UserError where text is missing, empty, not UTF-8 or too short.
    """
    rule, cache = DocumentRule.of(config), cache_folder(config)
    store = tokenize_files(config.files, rule, tokenizer, cache)
    if config.eval_files:
        other = tokenize_files(config.eval_files, rule, tokenizer, cache)
        train = PackedSamples(store, np.arange(store.num_documents), config.seqlen)
        evaluation = PackedSamples(
            other, np.arange(other.num_documents), config.seqlen, "evaluation"
        )
        fingerprint = f"{store.fingerprint}+{other.fingerprint}"
    else:
        if config.eval_fraction > 0.0 and store.num_documents < 2:
            raise UserError(
                f"data: {_names(config.files)} is one document, nothing can be kept for "
                "evaluation; give data.eval_files or set data.eval_fraction to 0"
            )
        mask = evaluation_documents(store.num_documents, config.eval_fraction)
        train = PackedSamples(store, np.flatnonzero(~mask), config.seqlen)
        evaluation = (
            PackedSamples(store, np.flatnonzero(mask), config.seqlen, "evaluation")
            if mask.any()
            else None
        )
        fingerprint = store.fingerprint
    return TrainingData(train=train, evaluation=evaluation, seed=seed, fingerprint=fingerprint)


def _names(files: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in files)
