"""Copies that lie in blocks of large pages: values, places, lifetimes, what stays where it is."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from ridgeline.core import large_pages
from ridgeline.core.large_pages import BLOCK_BYTES, LARGE_PAGE, LEAST_BYTES, in_large_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No block of another test."""
    monkeypatch.setattr(large_pages, "_current", large_pages._Current())


def span_of(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_copy_has_the_values_and_starts_a_large_page(dtype):
    tensor = torch.randint(0, 100, (1000, 77)).to(dtype)
    kept = in_large_pages(tensor)
    assert torch.equal(kept, tensor) and kept.dtype == dtype and kept.is_contiguous()
    assert kept.data_ptr() % LARGE_PAGE == 0 and kept.data_ptr() != tensor.data_ptr()


def test_tensors_lie_side_by_side_and_do_not_touch():
    made = [in_large_pages(torch.full((LEAST_BYTES + i,), i, dtype=torch.uint8)) for i in range(9)]
    for number, tensor in enumerate(made):
        assert bool((tensor == number).all()) and tensor.data_ptr() % 64 == 0
    for before, after in zip(made, made[1:], strict=False):
        assert 0 <= span_of(after).start - span_of(before).stop < 64


def test_a_tensor_of_any_size_has_room():
    first = in_large_pages(torch.ones(BLOCK_BYTES - 64, dtype=torch.uint8))
    second = in_large_pages(torch.ones(BLOCK_BYTES + 5, dtype=torch.uint8))
    assert int(first.sum()) == len(first) and int(second.sum()) == len(second)
    assert second.data_ptr() % LARGE_PAGE == 0


def test_memory_outlives_the_block_and_the_thread():
    """A tensor keeps its memory though nothing else does."""
    made: list[torch.Tensor] = []

    def work() -> None:
        made.extend(in_large_pages(torch.arange(BLOCK_BYTES // 16)) for _ in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    last = made[-1]
    made.clear()
    gc.collect()
    assert torch.equal(last, torch.arange(BLOCK_BYTES // 16))


def test_small_tensors_stay_where_they_are():
    tensor = torch.ones(LEAST_BYTES - 1, dtype=torch.uint8)
    assert in_large_pages(tensor) is tensor


def test_a_kernel_without_them_leaves_all_as_it_is(monkeypatch):
    monkeypatch.setattr(large_pages, "_new_block", lambda size: None)
    tensor = torch.ones(LEAST_BYTES)
    assert in_large_pages(tensor) is tensor


def test_what_is_made_in_inference_mode_serves_outside_it():
    with torch.inference_mode():
        kept = in_large_pages(torch.ones(LEAST_BYTES))
    kept.add_(1)
    assert not kept.is_inference() and float(kept[-1]) == 2
