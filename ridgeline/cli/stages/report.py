"""The report: every stage's section in one HTML file."""

from __future__ import annotations

from ridgeline.cli.stage import Context, Result, Stage, all_stages, need
from ridgeline.report.html import write
from ridgeline.report.section import Report, Section

NAME = "report.html"


def run(context: Context) -> Result:
    """Write the page from the results at hand."""
    sections = [
        stage.section(context.results[stage.name], context)
        for stage in all_stages()
        if stage.name in context.results and stage.name != "report"
    ]
    report = Report(
        title="ridgeline quickstart",
        lead=(
            "SmolLM2-135M-Instruct from 16-bit weights to a 4-bit checkpoint that answers, and a "
            "small decoder trained from scratch, all on the machine named at the end."
        ),
        sections=tuple(sections),
        machine=_machine(context),
    )
    path = write(report, context.folder / NAME)
    return {"path": str(path), "bytes": path.stat().st_size, "sections": len(sections)}


def _machine(context: Context) -> tuple[tuple[str, str], ...]:
    measured = need(context, "machine")
    facts = measured["machine"]
    packages = [f"{name} {value}" for name, value in measured["versions"].items() if value]
    times = [
        f"{name} {result['seconds']:.0f} s ({result['finished']})"
        for name, result in context.results.items()
    ]
    return (
        ("device used", measured["device"]["name"]),
        ("CPU", f"{facts['cpu']}, {facts['cpu_capability']}"),
        ("memory", f"{facts['memory_bytes'] / 2**30:.1f} GiB"),
        ("GPU", ", ".join(facts["gpus"]) or "none"),
        ("system", f"{facts['system']}, Python {facts['python']}"),
        ("versions", ", ".join([f"ridgeline {measured['ridgeline']}", *packages])),
        ("stages", "; ".join(times)),
        ("all stages", f"{sum(each['seconds'] for each in context.results.values()):.0f} s"),
    )


def say(result: Result) -> str:
    """Where it is."""
    return f"{result['path']} ({result['bytes'] / 1e3:.0f} kB)"


def section(result: Result, context: Context) -> Section:
    """The report says nothing of itself."""
    return Section(title="Report")


STAGE = Stage(
    name="report", order=90, title="report", run=run, section=section, say=say, kept=False
)
