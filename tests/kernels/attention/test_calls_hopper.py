"""Any sequence of calls gives the choices and launches that each call alone would give.

On a machine that pretends to be an H200: kernels and the other modules say what they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.core import arch as arches
from ridgeline.core import registry
from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import (
    calls,
    cute_sm90,
    cute_sm90_verified,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
)
from ridgeline.kernels.attention.recent import Recent

# A pretended card has no faster implementation to warn of.
pytestmark = pytest.mark.filterwarnings("ignore:attention:RuntimeWarning")


@dataclass(frozen=True)
class Call:
    """One call of a public function, and its surroundings."""

    batch: int = 2
    seqlens: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    layout: str = "dense"
    gradient: str = "none"
    numbers: tuple[tuple[str, Any], ...] = ()
    extra: str = "none"
    override: str | None = None
    unverified: bool = False


VALUES: dict[str, tuple[Any, ...]] = {
    "batch": (2, 1),
    "seqlens": ((64, 64), (3, 300), (129, 1)),
    "heads": ((4, 2), (4, 2), (3, 3), (4, 1), (3, 2)),
    "dims": ((64, 64), (128, 128), (192, 128), (256, 256), (20, 20)),
    "dtype": (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32),
    "layout": ("dense", "transposed", "sliced", "broadcast", "odd"),
    "gradient": ("none", "out", "expanded", "lse", "both"),
    "extra": ("none", "none", "none", "sinks", "used", "packed"),
    "override": (None, None, None, "triton", "cute_sm90"),
    "unverified": (False, True),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "causal": (False, True),
    "window_size": ((-1, -1), (-1, -1), (-1, -1), (7, 0), (None, 5), (-2, 0)),
    "softcap": (0.0, 0.0, 15.0),
    "softmax_scale": (None, 0.3),
    "deterministic": (False, True),
    "impl": (None, None, None, "cute_sm90", "triton"),
}
CALLS = st.builds(
    Call,
    **{name: st.sampled_from(values) for name, values in VALUES.items()},
    numbers=st.tuples(*[st.tuples(st.just(n), st.sampled_from(v)) for n, v in NUMBERS.items()]),
)


def _tensor(shape: tuple[int, ...], call: Call) -> torch.Tensor:
    b, s, h, d = shape
    if call.layout == "transposed":
        return torch.zeros(b, h, s, d, dtype=call.dtype).transpose(1, 2)
    if call.layout == "sliced":
        return torch.zeros(b, s, 2 * h, d, dtype=call.dtype)[:, :, ::2]
    if call.layout == "broadcast":
        return torch.zeros(1, s, h, d, dtype=call.dtype).expand(b, -1, -1, -1)
    if call.layout == "odd":
        return torch.zeros(b, s, h, d + 1, dtype=call.dtype)[..., :d]
    return torch.zeros(b, s, h, d, dtype=call.dtype)


class Machine:
    """An H200 whose kernels and other modules only say what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.given: list[torch.Tensor] = []
        self._patch = monkeypatch
        h200 = arches.pretend("sm90")
        monkeypatch.setattr(dispatch, "arch_of", lambda device: h200)
        monkeypatch.setattr(cute_sm90, "_arch", lambda device: KNOWN["sm90"])
        monkeypatch.setattr(cute_sm90, "_stream", lambda device: 7)
        monkeypatch.setattr(cute_sm90, "_plans", Recent(2))
        monkeypatch.setattr(cute_sm90, "_counters", {})
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(registry, "load", self._load)
        monkeypatch.setattr(cute_sm90.library, "kernel", self._kernel)

    def forget(self) -> None:
        calls.forget()
        dispatch._decide.cache_clear()
        cute_sm90._plans.clear()

    def _said(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        same = [n for n, x in enumerate(self.given) if x.data_ptr() == value.data_ptr()]
        return same[:1], tuple(value.shape), value.stride(), value.dtype

    def _kernel(self, *key: Any) -> Callable[..., None]:
        return lambda *given: self.seen.append((key, [self._said(x) for x in given]))

    def _load(self, impl: registry.Impl) -> Any:
        if impl.name == "cute_sm90":
            return cute_sm90

        def forward(q: Any, k: Any, v: Any, options: Any, extras: Any) -> Any:
            self.seen.append((impl.name, options, [self._said(x) for x in (q, k, v)]))
            rows = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
            return q.new_zeros((*q.shape[:-1], v.shape[-1])), torch.zeros(rows)

        def backward(*given: Any) -> Any:
            self.seen.append((impl.name, given[-2], [self._said(x) for x in given[:-2]]))
            q, k, v, extras = *given[2:5], given[-1]
            dsinks = None if extras.sinks_H is None else torch.zeros_like(extras.sinks_H)
            dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
            return SimpleNamespace(dq=dq, dk=dk, dv=dv, dsinks=dsinks, dbias=None)

        return SimpleNamespace(forward=forward, backward=backward)

    def said(self, call: Call) -> list[Any]:
        """All that modules and kernels are given for a call, and how it ends."""
        self.seen = []
        for name, value in (
            ("RIDGELINE_IMPL_ATTENTION", call.override),
            ("RIDGELINE_UNVERIFIED", "1" if call.unverified else None),
        ):
            if value is None:
                self._patch.delenv(name, raising=False)
            else:
                self._patch.setenv(name, value)
        (rows, keys), (heads, kv_heads), (dim, dim_v) = call.seqlens, call.heads, call.dims
        shapes = (rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim_v)
        qkv = [_tensor((call.batch, *shape), call) for shape in shapes]
        more: dict[str, Any] = dict(call.numbers)
        if call.extra == "packed":
            qkv = [x[0] for x in qkv]
        leaves = [x.requires_grad_(call.gradient != "none") for x in qkv]
        if call.extra == "sinks":
            leaves.append(torch.zeros(heads).requires_grad_(call.gradient != "none"))
            more["sinks"] = leaves[-1]
        self.given = leaves
        try:
            self.seen.append(self._results(call, leaves, more))
        except (ValueError, NotImplementedError) as error:
            self.seen.append((type(error), str(error)))
        return self.seen

    def _results(self, call: Call, leaves: list[torch.Tensor], more: dict[str, Any]) -> list[Any]:
        if call.extra == "packed":
            starts = [torch.tensor([0, n], dtype=torch.int32) for n in call.seqlens]
            run: Any = flash_attn_varlen_func
            out, lse = run(*leaves[:3], *starts, *call.seqlens, return_lse=True, **more)
        else:
            if call.extra == "used":
                more["seqused_k"] = torch.zeros(call.batch, dtype=torch.int32)
            out, lse = flash_attn_func(*leaves[:3], return_lse=True, **more)  # type: ignore[misc]
        found = [self._said(out), self._said(lse)]
        if call.gradient == "none":
            return found
        results = {"out": [out], "expanded": [out], "lse": [lse], "both": [out, lse]}[call.gradient]
        dense = [torch.zeros_like(x) for x in results]
        if call.gradient == "expanded":
            dense = [torch.zeros((), dtype=out.dtype).expand(out.shape)]
        return found + [self._said(x) for x in torch.autograd.grad(results, leaves, dense)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(monkeypatch)
    made.forget()
    yield made
    made.forget()


def _with(call: Call, name: str, value: Any) -> Call:
    if name in VALUES:
        return replace(call, **{name: value})
    return replace(call, numbers=tuple((n, value if n == name else v) for n, v in call.numbers))


def _value(call: Call, name: str) -> Any:
    return getattr(call, name) if name in VALUES else dict(call.numbers)[name]


def _check(machine: Machine, calls_made: list[Call], sequence: list[int]) -> None:
    alone = []
    for call in calls_made:
        machine.forget()
        alone.append(machine.said(call))
    machine.forget()
    for index in sequence:
        assert machine.said(calls_made[index]) == alone[index]


@pytest.mark.parametrize("gradient", ["none", "out"])
@pytest.mark.parametrize("name", [*VALUES, *NUMBERS])
def test_no_difference_of_calls_is_overlooked(machine: Machine, name: str, gradient: str) -> None:
    usual = Call(gradient=gradient, numbers=tuple((n, v[0]) for n, v in NUMBERS.items()))
    values = dict.fromkeys((VALUES | NUMBERS)[name])
    made = [_with(usual, name, value) for value in values]
    _check(machine, made, [*range(len(made)), *range(len(made))])


_DIFFERENCES = st.tuples(CALLS, st.sampled_from([*VALUES, *NUMBERS]))


@given(base=CALLS, others=st.lists(_DIFFERENCES, min_size=2, max_size=4), order=st.randoms())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_sequence_of_calls_is_as_if_each_were_the_first(
    machine: Machine, base: Call, others: list[tuple[Call, str]], order: Any
) -> None:
    pool = [base, *(_with(base, name, _value(other, name)) for other, name in others)]
    sequence = list(range(len(pool))) * 2
    order.shuffle(sequence)
    _check(machine, pool, sequence)


def test_switches_are_honoured_between_calls(machine: Machine) -> None:
    call = Call(gradient="out")

    def names(changed: Call) -> list[str]:
        said = machine.said(changed)[:-1]
        return [entry[0] if isinstance(entry[0], str) else "cute_sm90" for entry in said]

    for _ in range(2):
        assert names(call) == ["cute_sm90"] * 2
        assert names(replace(call, override="triton")) == ["triton"] * 2
        assert names(replace(call, dtype=torch.float32)) == ["triton"] * 2


def test_an_unverified_kernel_is_taken_when_asked_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = [replace(row, run=None) for row in cute_sm90_verified.FEATURES]
    monkeypatch.setattr(cute_sm90_verified, "FEATURES", tuple(features))
    for _ in range(2):
        assert machine.said(Call())[0][0] == "triton"
        assert not isinstance(machine.said(Call(unverified=True))[0][0], str)
