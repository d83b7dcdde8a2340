"""Pieces of work beside each other: the same results, errors and settings as one after another."""

from __future__ import annotations

import threading

import pytest
import torch

from ridgeline.quant.together import run_together


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def test_results_come_in_order_without_gradients(threads) -> None:
    weight, seen = torch.ones(3, requires_grad=True), set()

    def piece(number: int):
        seen.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return (weight * number).sum()

    found = run_together([lambda n=n: piece(n) for n in range(5)], "cpu")
    assert [float(x) for x in found] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert not any(x.requires_grad for x in found)
    assert seen == {(threads == 1, 1)}


def test_pieces_really_run_beside_each_other() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        meeting = threading.Barrier(2, timeout=60)
        run_together([meeting.wait, meeting.wait], "cpu")
    finally:
        torch.set_num_threads(before)


def test_an_error_comes_through(threads) -> None:
    def fail():
        raise ValueError("grid: piece must work")

    with pytest.raises(ValueError, match="piece must work"):
        run_together([fail, fail], "cpu")
    assert run_together([], "cpu") == []
