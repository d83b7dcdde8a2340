"""The one way a kernel is chosen: Problem -> select(problem, arch, impl) -> Impl -> module.

An implementation declares the architectures and dtypes it is written for and a function that says
why it refuses a problem (None: it accepts). `select` is pure: it needs neither the device nor the
implementation's module, so the choice for an H200 can be computed on a laptop. An explicit argument
beats the environment (RIDGELINE_IMPL_<OP>), which beats the priorities. If nothing accepts, the
error lists every implementation with its refusal. A fallback warns once a process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

from ridgeline.core import env
from ridgeline.core.arch import Arch
from ridgeline.core.roofline import Cost, Floor, floor


class Problem(Protocol):
    """Shapes, dtypes and options of one call: a frozen dataclass."""

    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    def cost(self) -> Cost: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation of an op."""

    op: str
    name: str
    archs: tuple[str, ...]
    """Families it runs on: "cpu", "sm80" (and every later sm), exactly "=sm90", or "any"."""
    dtypes: tuple[str, ...]
    refuses: Callable[[Any, Arch], str | None]
    """Why it does not take a problem, in a few words, or None."""
    priority: int
    """The larger wins among those that accept."""
    module: str
    """Imported when chosen, never before."""
    needs: tuple[str, ...] = ()
    """Importable top-level packages it stands on, checked without importing them."""
    early: bool = False
    """Imported with the op's package where its packages are there: that takes longer than a first
    call should."""
    extra: str = ""
    """The extra of this package that brings them: pip install ridgeline[extra]."""
    fallback: bool = False
    """True where being chosen automatically deserves a warning on that machine's GPU."""
    config: Callable[[Any, Arch], Any] | None = None
    """The pure function (problem, arch) -> tile config, for `explain`; None: no tile."""
    config_source: Callable[[Any, Arch], str] | None = None
    """Where that config comes from (tuned | table | fallback), for `explain`."""
    summary: str = ""
    """One line for tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What `explain` returns: the choice, everybody's refusal, the floor."""

    problem: Any
    arch: Arch
    chosen: Impl
    reason: str
    """explicit argument | environment | highest priority."""
    refusals: dict[str, str | None]
    """Implementation name -> why not (None: it would have accepted)."""
    config: Any
    config_source: str | None
    """tuned | table | fallback; None where the implementation has one source."""
    floor: Floor
    cost: Cost


_impls: dict[str, dict[str, Impl]] = {}
_warned: set[tuple[str, str, str]] = set()


def register(impl: Impl) -> Impl:
    """Add an implementation. Two of one name for an op are an error of ours."""
    table = _impls.setdefault(impl.op, {})
    assert impl.name not in table, f"{impl.op}: implementation {impl.name} registered twice"
    table[impl.name] = impl
    return impl


def ops() -> list[str]:
    """Names of ops that have implementations."""
    return sorted(_impls)


def impls(op: str) -> list[Impl]:
    """Implementations of an op, highest priority first. Raises: ValueError for an unknown op."""
    if op not in _impls:
        raise ValueError(
            f"registry: op must be one of {', '.join(ops())}, got {op!r}; import its kernels folder"
        )
    return sorted(_impls[op].values(), key=lambda impl: -impl.priority)


def runs_on(impl: Impl, arch: Arch) -> bool:
    """Whether the implementation is written for that architecture."""
    for family in impl.archs:
        if family == "any" or family == arch.name or family == f"={arch.name}":
            return True
        if family.startswith("sm") and arch.is_gpu and int(arch.name[2:]) >= int(family[2:]):
            return True
    return False


def refusal(impl: Impl, problem: Any, arch: Arch) -> str | None:
    """Why an implementation does not take a problem on an architecture, or None."""
    if not runs_on(impl, arch):
        families = ", ".join(family.removeprefix("=") for family in impl.archs)
        return f"written for {families}, not {arch.name}"
    if problem.dtype not in impl.dtypes:
        return f"takes {', '.join(impl.dtypes)}, not {problem.dtype}"
    if not arch.pretended and (missing := missing_packages(impl)):
        return f"needs the package {missing[0]}, which is not installed"
    return impl.refuses(problem, arch)


def missing_packages(impl: Impl) -> list[str]:
    """What an implementation stands on and this machine lacks."""
    return [package for package in impl.needs if importlib.util.find_spec(package) is None]


def select(problem: Any, arch: Arch, impl: str | None = None) -> Impl:
    """Choose the implementation for a problem; pure, works with a pretended arch.

    impl: a name, or None / "auto" for the environment's choice, then the highest priority. For a
    pretended arch the packages that this machine lacks do not count.
    Raises: ValueError for an unknown name; NotImplementedError, listing every refusal, when
    nothing accepts or the one asked for refuses.
    """
    asked, _ = _asked(problem.op, impl)
    candidates = impls(problem.op)
    if asked is not None:
        candidates = [c for c in candidates if c.name == asked]
    for candidate in candidates:
        if refusal(candidate, problem, arch) is None:
            return candidate
    raise _nothing_accepts(problem, arch, asked)


def explain(problem: Any, arch: Arch, impl: str | None = None) -> Decision:
    """Choose as `select` does and say why, with the tile config and the roofline floor."""
    chosen = select(problem, arch, impl)
    cost = problem.cost()
    return Decision(
        problem=problem,
        arch=arch,
        chosen=chosen,
        reason=_asked(problem.op, impl)[1],
        refusals={c.name: refusal(c, problem, arch) for c in impls(problem.op)},
        config=chosen.config(problem, arch) if chosen.config else None,
        config_source=chosen.config_source(problem, arch) if chosen.config_source else None,
        floor=floor(cost, arch.ceilings, problem.dtype),
        cost=cost,
    )


def _nothing_accepts(problem: Any, arch: Arch, asked: str | None) -> Exception:
    refusals = {c.name: refusal(c, problem, arch) for c in impls(problem.op)}
    if asked is not None and asked not in refusals:
        return ValueError(
            f"{problem.op}: impl must be one of {', '.join(refusals)}, got {asked!r}; use one of "
            "these or auto"
        )
    listing = "; ".join(f"{name}: {why or 'accepts'}" for name, why in refusals.items())
    who = f"implementation {asked} refuses" if asked else "no implementation accepts"
    return NotImplementedError(f"{problem.op}: {who} this problem on {arch.name} ({listing})")


def _asked(op: str, impl: str | None) -> tuple[str | None, str]:
    if impl not in (None, "auto"):
        return impl, "explicit argument"
    if from_env := env.impl_override(op):
        return (None, "highest priority") if from_env == "auto" else (from_env, "environment")
    return None, "highest priority"


def warn_fallback(impl: Impl, arch: Arch, why: str) -> None:
    """Warn, once a process, that something slower was taken."""
    key = (impl.op, impl.name, arch.name)
    if impl.fallback and arch.is_gpu and key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"{impl.op}: using the slower implementation {impl.name} on {arch.name} ({why}); "
            f"`ridgeline explain {impl.op}` says why",
            RuntimeWarning,
            stacklevel=3,
        )


def warn_lacking(problem: Any, arch: Arch, chosen: Impl) -> None:
    """Warn, once a process, where an implementation of an extra would have served on this GPU, had
    the machine what it stands on."""
    for impl in impls(problem.op):
        if impl is chosen or not arch.is_gpu:
            return
        why, key = refusal(impl, problem, arch), (impl.op, impl.name, arch.name)
        wanted = refusal(impl, problem, replace(arch, pretended=True)) is None
        if impl.extra and why is not None and wanted and key not in _warned:
            _warned.add(key)
            warnings.warn(
                f"{impl.op}: {chosen.name} serves on {arch.name}, as {impl.name} {why}; "
                f"pip install 'ridgeline[{impl.extra}]'",
                RuntimeWarning,
                stacklevel=3,
            )


def load_early(op: str) -> None:
    """Import the modules that a first call should not wait for. One that cannot be imported says so
    when it is chosen."""
    for impl in _impls[op].values():
        if impl.early and not missing_packages(impl):
            with contextlib.suppress(ImportError, OSError):
                load(impl)


def load(impl: Impl) -> ModuleType:
    """Import the module of a chosen implementation."""
    return importlib.import_module(impl.module)
