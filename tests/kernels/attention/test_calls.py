"""Known kinds of calls: the same choice, launch, result and error as of a call never seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.kernels.attention import calls, flash_attn_func, flash_attn_varlen_func
from ridgeline.kernels.attention.recent import Recent


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()


def _leaves(*heads: int, dim: int = 16) -> list[torch.Tensor]:
    return [torch.randn(2, 5 + n, n, dim, requires_grad=True) for n in heads]


def test_what_was_used_last_stays_and_the_rest_goes() -> None:
    recent: Recent[int] = Recent(3)
    for key in range(100):
        recent[key] = key
        assert recent.get(0) == 0  # asked for all the time
        assert len(recent) <= 6
    assert recent.get(50) is None and recent.get(99) == 99
    recent.clear()
    assert recent.get(99) is None and len(recent) == 0


def _grads(run: Callable[..., Any], *leaves: torch.Tensor) -> list[torch.Tensor]:
    out, lse = run(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    loss = (out * weights).sum() + (lse.nan_to_num(0, 0, 0) ** 2).sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kind", ["plain", "sinks and used keys", "packed"])
def test_known_calls_give_what_the_operator_gives(kind: str) -> None:
    q, k = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16)
    sinks, used = torch.randn(4, dtype=torch.bfloat16), torch.tensor([3, 9], dtype=torch.int32)
    leaves = [q, k, k.flip(1)]
    more: dict[str, Any] = {"causal": True, "return_lse": True}
    if kind == "packed":
        starts = torch.tensor([0, 2, 6], dtype=torch.int32)
        leaves = [x[0].contiguous() for x in (q, q[:, :, :2], q[:, :, 2:])]

        def run(*given: torch.Tensor) -> Any:
            return flash_attn_varlen_func(*given, starts, starts, 4, 4, **more)
    elif kind == "plain":

        def run(*given: torch.Tensor) -> Any:
            return flash_attn_func(*given, **more)
    else:
        leaves.append(sinks)

        def run(*given: torch.Tensor) -> Any:
            return flash_attn_func(*given[:3], sinks=given[3], seqused_k=used, **more)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    first, again = (_grads(run, *leaves) for _ in range(2))
    assert first[0].grad_fn is not None and "_Attention" in type(first[0].grad_fn).__name__
    # Nobody but a mode's owner asks for operators: the same call through them.
    with FlopCounterMode(display=False):
        wanted = _grads(run, *leaves)
    assert "_Attention" not in type(wanted[0].grad_fn).__name__
    for one, other, want in zip(first, again, wanted, strict=True):
        assert torch.equal(one, want) and torch.equal(other, want) and one.dtype == want.dtype


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = (leaf.detach() for leaf in _leaves(2, 2, 2))
    for leaf in (q, k, v) * 2:
        leaf.requires_grad_()
        flash_attn_func(q, k, v).sum().backward()
        assert [x.grad is not None for x in (q, k, v)] == [x is leaf for x in (q, k, v)]
        leaf.grad = None
        leaf.requires_grad_(False)
    with torch.no_grad():
        assert not flash_attn_func(q.requires_grad_(), k, v).requires_grad
    assert flash_attn_func(q, k, v).requires_grad


def test_a_second_derivative_is_refused_also_of_a_known_call() -> None:
    q, k, v = _leaves(2, 2, 2)
    for _ in range(2):
        (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative is not implemented"):
            dq.sum().backward()


def test_a_changed_input_is_noticed_in_backward() -> None:
    q, k, v = _leaves(2, 2, 2)
    for _ in range(2):
        moved = k * 1
        out = flash_attn_func(q, moved, v)
        moved.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_recomputation_may_meet_a_kind_that_was_unknown() -> None:
    q, k, v = _leaves(4, 2, 2)
    want = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), (q, k, v))
    for forgotten in (True, False):
        if forgotten:
            calls.forget()
        out = checkpoint(flash_attn_func, q, k, v, use_reentrant=False)
        if forgotten:
            calls.forget()  # the backward's forward learns the kind anew
        got = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_number_in_a_tensor_is_read_at_each_call() -> None:
    q, k, v = (leaf.detach() for leaf in _leaves(2, 2, 2))
    scale = torch.tensor(0.1)
    for value in (0.1, 2.0):
        scale.fill_(value)
        got = flash_attn_func(q, k, v, softmax_scale=scale, impl="ref")
        torch.testing.assert_close(got, flash_attn_func(q, k, v, softmax_scale=value, impl="ref"))


def test_values_on_the_host_are_checked_at_each_call() -> None:
    q, k, v = (leaf.detach() for leaf in _leaves(2, 2, 2))
    used = torch.tensor([2, 7], dtype=torch.int32)
    flash_attn_func(q, k, v, seqused_k=used)
    used[0] = 8
    with pytest.raises(ValueError, match="attention: seqused_k must have values from 0 to 7"):
        flash_attn_func(q, k, v, seqused_k=used)


def test_threads_share_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_kinds", Recent(2))  # so that they push each other out
    q, k, v = (leaf.detach() for leaf in _leaves(2, 2, 2))
    scales = [0.1 * (n + 1) for n in range(7)]
    wanted = [flash_attn_func(q, k, v, softmax_scale=scale) for scale in scales]
    wrong: list[float] = []

    def work(offset: int) -> None:
        for n in range(60):
            index = (n * (offset + 1) + offset) % len(scales)
            if not torch.equal(
                flash_attn_func(q, k, v, softmax_scale=scales[index]), wanted[index]
            ):
                wrong.append(scales[index])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(calls._kinds) <= 4
