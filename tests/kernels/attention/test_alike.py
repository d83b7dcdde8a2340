"""A check of inputs in one call: what it must tell apart, and that calls go by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.kernels.attention import calls, flash_attn_func
from ridgeline.kernels.attention.alike import like


def _qkv() -> list[torch.Tensor]:
    return [torch.randn(2, 6, heads, 16) for heads in (4, 2, 2)]


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "length": lambda x: x[:, 1:].contiguous(),
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda x: x.bfloat16(),
    "device": lambda x: x.to("meta"),
    "gradient": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("which", range(3))
def test_other_tensors_are_not_alike(what: str, which: int) -> None:
    qkv = _qkv()
    check = like(*qkv)
    assert check(*_qkv())
    assert not check(*(OTHERS[what](x) if i == which else x for i, x in enumerate(qkv)))


def test_listeners_are_noticed() -> None:
    qkv = _qkv()
    check, said = like(*qkv), []

    def ask(x: torch.Tensor) -> torch.Tensor:
        said.append(check(*qkv))
        return x.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ask(qkv[0])
    with FlopCounterMode(display=False):
        ask(qkv[0])
    with torch.inference_mode():
        ask(qkv[0])
    torch.func.grad(ask)(torch.zeros(3))
    torch.func.vmap(ask)(torch.zeros(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(ask, (torch.zeros(3),), check_trace=False)
    assert said == [False] * 6


def test_gradients_switched_off_and_on_are_noticed() -> None:
    calls.forget()
    leaves = [x.requires_grad_() for x in _qkv()]
    for _ in range(3):
        assert flash_attn_func(*leaves).requires_grad  # type: ignore[union-attr]
    with torch.no_grad():
        for _ in range(3):
            assert not flash_attn_func(*leaves).requires_grad  # type: ignore[union-attr]
    assert flash_attn_func(*leaves).requires_grad  # type: ignore[union-attr]
    calls.forget()


def test_layers_that_alternate_are_both_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.forget()
    qkv, windows = _qkv(), ((-1, -1), (2, 0))
    exact = [flash_attn_func(*qkv, causal=True, window_size=w) for w in windows]
    for window in windows:  # a kind's second call makes it the last
        flash_attn_func(*qkv, causal=True, window_size=window)
    monkeypatch.setattr(calls, "_looked_up", lambda *_: pytest.fail("should be known"))
    for _ in range(2):
        for window, out in zip(windows, exact, strict=True):
            found = flash_attn_func(*qkv, causal=True, window_size=window)
            assert torch.equal(found, out)  # type: ignore[arg-type]
    assert not torch.equal(*exact)  # type: ignore[arg-type]
    calls.forget()


def test_the_switch_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.forget()
    qkv = _qkv()
    for _ in range(2):
        flash_attn_func(*qkv)
    asked = []
    monkeypatch.setattr(calls, "_looked_up", lambda *given: asked.append(given))
    flash_attn_func(*qkv)
    assert not asked
    monkeypatch.setenv("RIDGELINE_IMPL_ATTENTION", "ref")
    flash_attn_func(*qkv)
    assert len(asked) == 1
    calls.forget()


def test_last_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.forget()
    monkeypatch.setattr(calls, "MOST_LAST", 4)
    qkv = _qkv()
    for left in range(9):
        for _ in range(2):
            flash_attn_func(*qkv, window_size=(left, 0))
        assert len(calls._last) <= 4
    calls.forget()


def test_without_the_check_calls_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    calls.forget()
    qkv = _qkv()
    exact = flash_attn_func(*qkv)
    monkeypatch.delattr(guards, "TensorGuards")
    assert not like(*qkv)(*qkv)
    for _ in range(2):
        assert torch.equal(flash_attn_func(*qkv), exact)  # type: ignore[arg-type]
    calls.forget()
