"""`ridgeline explain <op>`: the decision for one problem, on this machine or a pretended one."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.cli.problems import QUERIES, Query, resolve_arch
from ridgeline.cli.tables import bytes_text, flops_text, number, table
from ridgeline.core import registry
from ridgeline.core.roofline import ridge


def explain(config: Query) -> Result:
    """Which implementation a problem gets, its tile, why the others refuse, and its floor.

    Raises: ValueError for an unknown arch or impl; NotImplementedError, listing every refusal, when
    no implementation accepts.
    """
    problem = config.problem()
    arch = resolve_arch(config.arch)
    decision = registry.explain(problem, arch, config.impl)
    ceilings = arch.ceilings
    return {
        "op": problem.op,
        "problem": asdict(problem),
        "arch": arch.name,
        "device": arch.device,
        "chosen": decision.chosen.name,
        "module": decision.chosen.module,
        "reason": decision.reason,
        "config": _config_dict(decision.config),
        "config_source": decision.config_source,
        "impls": [
            {
                "name": impl.name,
                "priority": impl.priority,
                "refusal": decision.refusals[impl.name],
                "missing": registry.missing_packages(impl),
                "summary": impl.summary,
            }
            for impl in registry.impls(problem.op)
        ],
        "flops": decision.cost.flops,
        "bytes": decision.cost.bytes,
        "intensity": decision.cost.intensity,
        "ridge": ridge(ceilings, problem.dtype),
        "floor_us": decision.floor.us,
        "compute_us": decision.floor.compute_us,
        "memory_us": decision.floor.memory_us,
        "bound": decision.floor.bound,
        "ceiling_tflops": ceilings.tflops(problem.dtype),
        "ceiling_read_gbps": ceilings.read_gbps,
        "ceilings": ceilings.source,
    }


def show(result: Result) -> str:
    """The decision as text."""
    dtype = result["problem"]["dtype"]
    lines = [
        f"{result['op']}: {_problem_text(result['problem'])}",
        f"on {result['arch']} ({result['device']})",
        "",
        f"kernel     {result['chosen']}, {result['reason']} ({result['module']})",
        f"tile       {_tile_text(result['config'], result['config_source'])}",
        f"work       {flops_text(result['flops'])}, {bytes_text(result['bytes'])} at the least: "
        f"{number(result['intensity'])} FLOP/byte",
        f"ridge      {number(result['ridge'])} FLOP/byte in {dtype}: "
        f"{number(result['ceiling_tflops'])} TFLOP/s over "
        f"{number(result['ceiling_read_gbps'])} GB/s",
        f"floor      {number(result['floor_us'])} us, {result['bound']}-bound "
        f"(compute {number(result['compute_us'])} us, memory {number(result['memory_us'])} us)",
        f"ceilings   {result['ceilings']}",
        "",
        table(
            ("implementation", "priority", "verdict"),
            [
                (
                    impl["name"],
                    str(impl["priority"]),
                    _verdict(impl, result["chosen"]),
                )
                for impl in result["impls"]
            ],
        ),
    ]
    return "\n".join(lines)


def _verdict(impl: dict[str, Any], chosen: str) -> str:
    if impl["refusal"]:
        return f"refuses: {impl['refusal']}"
    verdict = "chosen" if impl["name"] == chosen else "would accept"
    if not impl["missing"]:
        return verdict
    return f"{verdict}; to run it, this machine would need {', '.join(impl['missing'])}"


_SOURCES = {"tuned": "tuned on this machine", "table": "from the shipped table"}


def _tile_text(config: Any, source: str | None) -> str:
    text = config_text(config)
    return f"{text} ({_SOURCES.get(source, source)})" if source else text


def _config_dict(config: Any) -> Any:
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else config


def config_text(config: Any) -> str:
    """A config's fields in words."""
    if not isinstance(config, dict):
        return "left to the implementation" if config is None else str(config)
    parts = []
    for name, value in config.items():
        if isinstance(value, dict):
            parts.append(f"{name} ({config_text(value)})")
        elif value is True:
            parts.append(name)
        elif value not in (False, None):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _problem_text(problem: dict[str, Any]) -> str:
    parts = []
    for name, value in problem.items():
        if value is True:
            parts.append(name)
        elif value not in (False, None, 0.0):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


COMMAND = Command(
    run=explain, config=QUERIES, show=show, kept=nothing_kept, flags={"arch.name": "--arch"}
)
