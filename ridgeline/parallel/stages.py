"""Cutting a decoder's layers into pipeline stages of equal cost, embedding and head counted.

Cost of a token, in FLOPs of forward and backward: a layer 6 x its matrices + 12 H D x the keys it
sees; the head 6 C V. The embedding has no FLOPs: its bytes (a row read, its gradient written) count
at the FLOPs that the hardware could have done meanwhile. The slowest stage sets the pace of all, so
the largest is made as small as contiguous cuts allow.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import DecoderPart

_FLOPS_A_BYTE = 200.0
"""Matmul FLOPs in the time of a byte from memory, about what an H200 does (700 T over 3.9 T)."""
_EMBEDDING_BYTES = 4 * 2.0
"""Bytes an element of an embedded token: bf16, read and written forward and backward."""


def layer_costs(config: DecoderConfig, seqlen: int) -> list[float]:
    """FLOPs a token of each layer."""
    linears = 6.0 * (config.matmul_params() - config.vocab_size * config.hidden_size)
    costs: list[float] = []
    for layer in range(config.num_layers):
        window = config.window(layer)
        keys = seqlen / 2 if window is None else min(window, seqlen / 2)
        attention = 12.0 * config.num_heads * config.head_dim * keys
        costs.append(linears / config.num_layers + attention)
    return costs


def cut_layers(config: DecoderConfig, num_stages: int, seqlen: int) -> list[DecoderPart]:
    """The stages: every layer once, in order, each stage at least one."""
    embed = _EMBEDDING_BYTES * config.hidden_size * _FLOPS_A_BYTE
    head = 6.0 * config.hidden_size * config.vocab_size
    ends = balance(layer_costs(config, seqlen), num_stages, first=embed, last=head)
    starts = [0, *ends[:-1]]
    return [
        DecoderPart(
            first_layer=start, end_layer=end, embed=stage == 0, head=stage == num_stages - 1
        )
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def balance(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Where each of the stages ends, such that the costliest is as cheap as it can be.

    first and last: what the first and the last stage bear besides their layers. Dynamic programming
    over (stages, layers); among equals the earliest cut that leaves the rest no worse.
    """
    count = len(costs)
    assert 1 <= num_stages <= count
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def cost_of(start: int, end: int, stage: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return before[end] - before[start] + extra

    infinite = float("inf")
    best = [[infinite] * (count + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(num_stages):
        for end in range(stage + 1, count + 1):
            for start in range(stage, end):
                worst = max(best[stage][start], cost_of(start, end, stage))
                if worst < best[stage + 1][end]:
                    best[stage + 1][end], cut[stage + 1][end] = worst, start
    ends = [count]
    for stage in range(num_stages, 1, -1):
        ends.append(cut[stage][ends[-1]])
    return ends[::-1]
