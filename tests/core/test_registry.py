from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ridgeline.core import arch, registry
from ridgeline.core.registry import Impl
from ridgeline.core.roofline import Cost


@dataclass(frozen=True)
class Toy:
    size: int
    dtype: str = "float32"
    op: str = "toy"

    def cost(self) -> Cost:
        return Cost(flops=2.0 * self.size**3, bytes=12.0 * self.size**2)


def _impl(name, priority, archs, refuses=lambda p, a: None, **more):
    return Impl(
        op="toy",
        name=name,
        archs=archs,
        dtypes=("float32",),
        refuses=refuses,
        priority=priority,
        module="math",
        **more,
    )


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(registry, "_impls", {})
    monkeypatch.setattr(registry, "_warned", set())
    too_big = lambda p, a: "size over 64" if p.size > 64 else None  # noqa: E731
    registry.register(_impl("ref", 0, ("any",)))
    registry.register(_impl("triton", 10, ("sm80",), fallback=True))
    registry.register(_impl("cute", 20, ("=sm90",), refuses=too_big))
    registry.register(_impl("missing", 30, ("any",), needs=("no_such_package",)))


def at_hand(name):
    """As if a device of that family were here."""
    return replace(arch.pretend(name), pretended=False)


@pytest.mark.parametrize(
    ("name", "size", "chosen"),
    [("cpu", 8, "ref"), ("sm80", 8, "triton"), ("sm90", 8, "cute"), ("sm90", 65, "triton"),
     ("sm100", 8, "triton")],
)  # fmt: skip
def test_the_highest_priority_that_accepts_wins(toy, name, size, chosen):
    assert registry.select(Toy(size), at_hand(name)).name == chosen


def test_argument_beats_environment_beats_priority(toy, monkeypatch):
    h200 = at_hand("sm90")
    monkeypatch.setenv("RIDGELINE_IMPL_TOY", "triton")
    assert registry.explain(Toy(8), h200).reason == "environment"
    assert registry.select(Toy(8), h200).name == "triton"
    assert registry.select(Toy(8), h200, impl="ref").name == "ref"
    assert registry.select(Toy(8), h200, impl="auto").name == "triton"
    monkeypatch.setenv("RIDGELINE_IMPL_TOY", "auto")
    assert registry.select(Toy(8), h200).name == "cute"


def test_failure_lists_every_refusal(toy):
    with pytest.raises(NotImplementedError) as caught:
        registry.select(Toy(8, dtype="int8"), at_hand("cpu"))
    text = str(caught.value)
    assert "no implementation accepts this problem on cpu" in text
    for part in (
        "ref: takes float32, not int8",
        "triton: written for sm80, not cpu",
        "missing: takes float32",
    ):
        assert part in text
    with pytest.raises(NotImplementedError, match="implementation cute refuses.*size over 64"):
        registry.select(Toy(65), at_hand("sm90"), impl="cute")
    with pytest.raises(ValueError, match="impl must be one of .*got 'cut'"):
        registry.select(Toy(8), at_hand("sm90"), impl="cut")
    with pytest.raises(NotImplementedError, match="needs the package no_such_package"):
        registry.select(Toy(8), at_hand("sm90"), impl="missing")


def test_explain_gives_cost_and_floor(toy):
    decision = registry.explain(Toy(64), arch.pretend("sm90"))
    assert decision.cost == Cost(flops=2.0 * 64**3, bytes=12.0 * 64**2)
    assert decision.floor.memory_us == pytest.approx(12 * 64**2 / 4350e3)
    assert decision.floor.compute_us == pytest.approx(2 * 64**3 / 50e6)
    assert decision.floor.bound == "memory"
    assert decision.refusals["cute"] is None and "sm80" in registry.explain(
        Toy(64), arch.pretend("cpu")
    ).refusals["triton"]  # fmt: skip


def test_fallback_warns_once(toy):
    h200 = at_hand("sm90")
    slow = registry.select(Toy(65), h200)
    with pytest.warns(RuntimeWarning, match="slower implementation triton on sm90"):
        registry.warn_fallback(slow, h200, "size over 64")
    registry.warn_fallback(slow, h200, "size over 64")  # a second warning would be an error


def test_what_an_extra_would_bring_is_told_once(toy, monkeypatch):
    h200, laptop = at_hand("sm90"), at_hand("sm80")
    quick = _impl("quick", 40, ("=sm90",), needs=("no_such_package",), extra="fast")
    registry.register(quick)
    chosen = registry.select(Toy(8), h200)
    assert chosen.name == "cute"
    with pytest.warns(
        RuntimeWarning, match=r"quick needs the package no_such.*'ridgeline\[fast\]'"
    ):
        registry.warn_lacking(Toy(8), h200, chosen)
    registry.warn_lacking(Toy(8), h200, chosen)  # a second warning would be an error
    registry._warned.clear()
    registry.warn_lacking(Toy(8), laptop, registry.select(Toy(8), laptop))
    registry.warn_lacking(Toy(8), arch.pretend("sm90"), quick)
    # Nothing is lacking where the problem itself is refused.
    refuses = lambda p, a: "odd sizes"  # noqa: E731
    registry.register(_impl("odd", 50, ("=sm90",), refuses, needs=("no_such_package",), extra="x"))
    monkeypatch.delitem(registry._impls["toy"], "quick")
    registry.warn_lacking(Toy(8), h200, chosen)


def test_registering_twice_is_our_bug(toy):
    with pytest.raises(AssertionError, match="registered twice"):
        registry.register(_impl("ref", 1, ("any",)))


def test_a_pretended_device_is_not_judged_by_what_is_installed_here(toy):
    assert registry.select(Toy(8), arch.pretend("sm90")).name == "missing"
    assert registry.missing_packages(registry.impls("toy")[0]) == ["no_such_package"]


def test_what_a_first_call_should_not_wait_for_is_imported_early(monkeypatch):
    made = {name: _impl(name, 0, ("any",), early=name != "b") for name in "abcd"}
    made["c"] = replace(made["c"], needs=("no_such_package",))
    monkeypatch.setitem(registry._impls, "soon", made)
    loaded = []

    def load(impl):
        loaded.append(impl.name)
        if impl.name == "a":
            raise ImportError("broken")

    monkeypatch.setattr(registry, "load", load)
    registry.load_early("soon")
    assert loaded == ["a", "d"]
