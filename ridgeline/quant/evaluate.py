"""Held-out tokens that follow a run: through every block before and after it is quantized.

So the comparison needs one block in memory, like the run itself: at the end the head turns both
streams into distributions, and perplexities, KL and agreement come out. Between the blocks the two
streams say how far the quantized model has drifted.
Cost: two forwards of the held-out tokens and their hidden states twice.
"""

from __future__ import annotations

import math

import torch

from ridgeline.core import progress
from ridgeline.core.protocols import BlockwiseModel, HeadedModel
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.report import EvaluationReport

_SLICE_TOKENS = 256


class Evaluation:
    """One model's held-out windows, int64 [W, S]; a rank takes its share."""

    def __init__(
        self, model: BlockwiseModel, token_ids_WS: torch.Tensor, ranks: Ranks | None = None
    ) -> None:
        self.model, self.window = model, token_ids_WS.shape[1]
        self.ids = (ranks or Ranks()).share(list(token_ids_WS))
        self.exact_head = model.head
        self.exact: list[torch.Tensor] = []
        self.quantized: list[torch.Tensor] = []

    def embed(self) -> None:
        """Start both streams."""
        self.exact = [self.model.embed(ids[None]) for ids in self.ids]
        self.quantized = [x.clone() for x in self.exact]

    def before(self, index: int) -> None:
        """Through a block as it is in the unquantized model."""
        self.exact = [self.model.run_block(index, x) for x in self.exact]

    def after(self, index: int, ranks: Ranks) -> float:
        """Through the block now quantized; the relative distance of the two streams."""
        self.quantized = [self.model.run_block(index, x) for x in self.quantized]
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in zip(self.exact, self.quantized, strict=True):
            sums[0] += (y.float() - x.float()).square().sum().double().cpu()
            sums[1] += x.float().square().sum().double().cpu()
        sums = _summed(sums, ranks)
        return float((sums[0] / sums[1].clamp(min=1e-30)).sqrt())

    def before_head(self) -> None:
        """Remember the projection as it is in the unquantized model."""
        assert isinstance(self.model, HeadedModel)
        model, linear = self.model, self.model.head_linear()
        weight, bias = linear.weight.detach().clone(), linear.bias
        self.exact_head = lambda x: torch.nn.functional.linear(model.head_input(x), weight, bias)

    def state(self) -> list[torch.Tensor]:
        """Both streams, for a journal."""
        return [*self.exact, *self.quantized]

    def restore(self, state: list[torch.Tensor]) -> None:
        """Go on from `state()`."""
        half = len(self.ids)
        self.exact, self.quantized = list(state[:half]), list(state[half:])

    def finish(self, ranks: Ranks) -> EvaluationReport:
        """What the two models predict."""
        sums = torch.zeros(5, dtype=torch.float64)
        with torch.no_grad(), progress.task("evaluate", len(self.ids), "windows") as advance:
            for ids, x, y in zip(self.ids, self.exact, self.quantized, strict=True):
                for start in range(0, self.window - 1, _SLICE_TOKENS):
                    end = min(start + _SLICE_TOKENS, self.window - 1)
                    target = ids[start + 1 : end + 1]
                    p = self.exact_head(x[:, start:end])[0].float().log_softmax(-1)
                    q = self.model.head(y[:, start:end])[0].float().log_softmax(-1)
                    sums += torch.stack(
                        [
                            -p.gather(-1, target[:, None]).double().sum(),
                            -q.gather(-1, target[:, None]).double().sum(),
                            (p.exp() * (p - q)).double().sum(),
                            (p.argmax(-1) == q.argmax(-1)).double().sum(),
                            torch.tensor(float(end - start), dtype=torch.float64, device=p.device),
                        ]
                    ).cpu()
                advance(1)
        before, after, kl, agree, tokens = _summed(sums, ranks).tolist()
        return EvaluationReport(
            ppl_before=math.exp(min(before / tokens, 700.0)),
            ppl_after=math.exp(min(after / tokens, 700.0)),
            kl=kl / tokens,
            top1_agreement=agree / tokens,
            tokens=int(tokens),
            window=self.window,
        )


def _summed(sums: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Over ranks, on the device that they talk through."""
    if ranks.world == 1:
        return sums
    there = sums.to(ranks.device)
    ranks.sum_(there)
    return there.cpu()
