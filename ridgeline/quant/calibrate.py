"""Quantize a whole model block by block, on any model that is a BlockwiseModel.

Only one block's activations and Hessians are alive at a time, and of a StreamedModel only one
block's weights. Inside a block the groups of linears are taken in data-flow order, each on the
outputs of its quantized predecessors (staged.py); the block's outputs through its quantized layers
are the next block's inputs. Two runs give the same bits. Cost: one forward of the calibration
tokens, 2 T K^2 FLOPs of Hessian a distinct input, and the solve; awq adds its search (awq.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ridgeline.core import progress
from ridgeline.core.errors import bad_type, bad_value
from ridgeline.core.protocols import BlockwiseModel, FoldableModel, StreamedModel
from ridgeline.formats.base import QuantizedWeight
from ridgeline.quant.batches import Batch, token_batches
from ridgeline.quant.block import BlockResult, BlockWorker, block_indices
from ridgeline.quant.evaluate import Evaluation
from ridgeline.quant.journal import Journal
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import BlockReport, QuantizedModel

OnBlock = Callable[[int, dict[str, QuantizedWeight]], None]
_TOKENS_PER_INPUT = 4
"""Below so many tokens an input, H is dominated by the sample (docs/log/quantize.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What goes on around the blocks of a run; by default nothing."""

    lengths_B: torch.Tensor | None = None
    """Tokens of each calibration row, right padding left out; None: rows are full."""
    on_block: OnBlock | None = None
    """Called with (index, {full name: weight}) as each block is done, to stream it out."""
    keep_weights: bool = True
    """Whether the result holds the weights; False where on_block takes them."""
    journal: Journal | None = None
    """Keeps every finished block on disk and goes on from there. The result of a StreamedModel
    then holds no weights; a model in memory gets those of finished blocks back."""
    evaluation: Evaluation | None = None
    """Held-out tokens that follow the run through the blocks."""
    ranks: Ranks = field(default_factory=Ranks)


def quantize_model(
    model: BlockwiseModel,
    token_ids_BS: torch.Tensor | None,
    recipe: Recipe,
    *,
    on_block: OnBlock | None = None,
    around: Around | None = None,
) -> QuantizedModel:
    """Quantize every linear of every block as the recipe says.

    The model's own weights are replaced by the dequantized ones as the run goes on (that is what
    the later blocks are calibrated on), and norms change where awq folds a scale into them; after
    an exception they are partly replaced: load the model again.
    Shapes: token_ids int64 [B, S]; not needed (None) for rtn.
    Raises: TypeError for a model that is no BlockwiseModel, or for awq no FoldableModel; ValueError
    for missing token ids; UserError for weights or activations that are not finite or a Hessian
    that cannot be factorized.
    """
    if not isinstance(model, BlockwiseModel):
        raise bad_type(
            "quantize", "model", "be a BlockwiseModel", type(model).__name__, "wrap it in one"
        )
    if recipe.folds and not isinstance(model, FoldableModel):
        raise bad_type(
            "quantize",
            "model",
            "say where scales fold (scale_folds) for awq",
            type(model).__name__,
            "use gptq or rtn",
        )
    around = around or Around(on_block=on_block)
    start = time.perf_counter()
    indices = block_indices(model)
    layers = len(indices) * sum(len(group) for group in model.linear_groups())
    with progress.task(f"quantize ({recipe.method})", layers, "layers") as advance, _exact_fp32():
        worker = BlockWorker(model, recipe, around.ranks, advance)
        run = _Run(worker, around)
        with torch.no_grad():
            tokens = run.all_blocks(token_ids_BS)
    return QuantizedModel(
        weights=run.weights,
        reports=[report for result in run.results for report in result.reports],
        skipped=[name for result in run.results for name in result.skipped],
        folds=[fold for result in run.results for fold in result.folds],
        blocks=[result.block for result in run.results if result.block is not None],
        evaluation=None if around.evaluation is None else around.evaluation.finish(around.ranks),
        calibration_tokens=tokens,
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _exact_fp32() -> Iterator[None]:
    """Matrix products of fp32 in fp32 (no TF32) while the run lasts."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _checked(token_ids_BS: torch.Tensor | None) -> torch.Tensor:
    if token_ids_BS is None or token_ids_BS.dim() != 2 or token_ids_BS.numel() == 0:
        got = None if token_ids_BS is None else list(token_ids_BS.shape)
        raise bad_value(
            "quantize",
            "token_ids_BS",
            "hold calibration sequences [B, S]",
            got,
            "give text, or use method rtn",
        )
    return token_ids_BS


class _Run:
    """The walk over the blocks."""

    def __init__(self, worker: BlockWorker, around: Around) -> None:
        self.worker, self.around = worker, around
        self.model, self.recipe = worker.model, worker.recipe
        self.weights: dict[str, QuantizedWeight] = {}
        self.results: list[BlockResult] = []
        self.head_done = False

    def all_blocks(self, token_ids_BS: torch.Tensor | None) -> int:
        """Every block that the journal does not hold yet; returns the calibration tokens."""
        indices = block_indices(self.model)
        if not isinstance(self.model, StreamedModel):
            for index in indices:  # before any work
                self.worker.check_weights(index)
        batches, tokens = self._start(token_ids_BS)
        journal, evaluation = self.around.journal, self.around.evaluation
        if journal is not None and (state := journal.last_state()) is not None:
            self.results = [journal.result_of(index) for index in indices[: state.blocks]]
            if state.batches:  # none are kept after the last block
                batches = [b.carrying(x) for b, x in zip(batches, state.batches, strict=True)]
            if evaluation is not None:
                evaluation.restore(state.evaluation)
            if not isinstance(self.model, StreamedModel):
                for index in indices[: state.blocks]:
                    self._put_back(index, journal)
            done = sum(len(r.reports) + len(r.skipped) for r in self.results)
            self.worker.advance(done, note=f"{state.blocks} blocks kept from before")
            indices = indices[state.blocks :]
            self.head_done = len(self.results) < state.blocks
        elif self.recipe.method != "rtn" or evaluation is not None:
            batches = [batch.carrying(self.model.embed(batch.x)) for batch in batches]
            if evaluation is not None:
                evaluation.embed()
        for index in indices:
            batches = self._block(index, batches)
        if self.recipe.lm_head:
            self._head(batches)
        return tokens

    def _put_back(self, index: int, journal: Journal) -> None:
        """A block finished before, into a model that is held in memory, and into the result."""
        weights, plain = journal.weights_of(index)
        self.worker.put_back(index, weights, plain)
        if self.around.keep_weights:
            self.weights |= weights

    def _head(self, batches: list[Batch]) -> None:
        """The vocabulary projection, as one more block after the last."""
        evaluation, journal = self.around.evaluation, self.around.journal
        index = len(self.results)
        if evaluation is not None:
            evaluation.before_head()
        if self.head_done and journal is not None:
            result = journal.result_of(index)
            weights, _ = journal.weights_of(index)
            self.worker.put_back(index, weights, {})
            if not isinstance(self.model, StreamedModel) and self.around.keep_weights:
                self.weights |= weights
        else:
            result = self.worker.solve_head(index, batches)
            if journal is not None:
                contents = [batch.x for batch in batches]
                journal.keep(self.model, result, contents, evaluation, self.around.ranks)
        if self.around.on_block is not None:
            self.around.on_block(index, result.weights)
        self._hold(result)
        self.results.append(result)

    def _hold(self, result: BlockResult) -> None:
        """Keep a block's weights where the result is to have them."""
        on_disk = self.around.journal is not None and isinstance(self.model, StreamedModel)
        if self.around.keep_weights and not on_disk:
            self.weights |= result.weights
        result.weights = {}

    def _start(self, token_ids_BS: torch.Tensor | None) -> tuple[list[Batch], int]:
        """(this rank's batches of token ids, tokens of all ranks)."""
        if self.recipe.method == "rtn":
            return [], 0
        batches = token_batches(
            _checked(token_ids_BS), self.around.lengths_B, self.recipe.batch_sequences
        )
        tokens = sum(batch.tokens for batch in batches)
        self._warn_of_little_text(tokens)
        return self.around.ranks.share(batches), tokens

    def _warn_of_little_text(self, tokens: int) -> None:
        first = self.model.blocks[block_indices(self.model)[0]]
        widest = max(first.get_submodule(name).weight.shape[1] for name in self.worker.names())
        if tokens < _TOKENS_PER_INPUT * widest:
            progress.say(
                f"quantize: {tokens} calibration tokens are few for layers of {widest} inputs; "
                f"{_TOKENS_PER_INPUT * widest} or more generalize better"
            )

    def _block(self, index: int, batches: list[Batch]) -> list[Batch]:
        start = time.perf_counter()
        evaluation, journal = self.around.evaluation, self.around.journal
        streamed = self.model if isinstance(self.model, StreamedModel) else None
        if streamed is not None:
            streamed.acquire_block(index)
            self.worker.check_weights(index)
        if evaluation is not None:
            evaluation.before(index)
        if self.recipe.method == "rtn":
            result = self.worker.round(index)
        else:
            last = index == block_indices(self.model)[-1] and not self.recipe.lm_head
            result, batches = self.worker.calibrate(index, batches, last=last)
        error = None if evaluation is None else evaluation.after(index, self.around.ranks)
        result.block = BlockReport(
            name=self.model.block_prefix(index),
            held_out_error=error,
            seconds=time.perf_counter() - start,
        )
        if self.around.on_block is not None:
            self.around.on_block(index, result.weights)
        if journal is not None:
            contents = [batch.x for batch in batches]
            journal.keep(self.model, result, contents, evaluation, self.around.ranks)
        self._hold(result)
        if streamed is not None:
            streamed.release_block(index)
        self.results.append(result)
        return batches
