"""The ring under a process group that does nothing before wait(): what a GPU's stream may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.parallel.context import held_tokens
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.verify import Report, compare
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import TINY, batch_samples, build

_real = dist.batch_isend_irecv


class _Late:
    """Transfers that take place when somebody waits: a buffer read before that holds NaN, and one
    that is changed before that is found out."""

    begun = 0
    waited = 0

    def __init__(self, operations: list[dist.P2POp]) -> None:
        type(self).begun += 1
        self._operations = operations
        self._sent = [op.tensor.clone() for op in operations if op.op is dist.isend]
        for op in operations:
            assert op.tensor.is_contiguous()  # NCCL takes no other
            if op.op is dist.irecv:
                op.tensor.fill_(float("nan"))

    def wait(self) -> None:
        type(self).waited += 1
        now = [op.tensor for op in self._operations if op.op is dist.isend]
        assert all(torch.equal(a, b) for a, b in zip(self._sent, now, strict=True))
        for work in _real(self._operations):
            work.wait()


def _compare_late(rank: int, layout: Layout) -> tuple[int, int, Report | None]:
    dist.batch_isend_irecv = lambda operations: [_Late(operations)]
    model = build(layout, TINY)
    report = compare(model, batch_samples=batch_samples(model), steps=1)
    return _Late.begun, _Late.waited, report


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_waits_before_it_reads_and_before_it_changes_what_it_sent(ranks: int) -> None:
    found: list[tuple[int, int, Any]] = run_ranks(ranks, _compare_late, Layout(cp=ranks))
    hops = TINY.num_layers * ((ranks - 1) * 2 + ranks)  # forward and backward K, V; dK, dV
    assert [(begun, waited) for begun, waited, _ in found] == [(hops, hops)] * ranks
    assert found[0][2].ok, found[0][2].first


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_every_rank_sees_as_many_keys_of_a_whole_document(cp: int) -> None:
    tokens = [held_tokens(2 * 48 * cp, 48 * cp, cp, rank) for rank in range(cp)]
    assert sorted(int(token) for own in tokens for token in own) == list(range(2 * 48 * cp))
    pairs = {int((own % (48 * cp) + 1).sum()) for own in tokens}
    assert len(pairs) == 1
