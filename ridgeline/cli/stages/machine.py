"""Measure the machine, so that every later stage can say what share of it was used."""

from __future__ import annotations

from ridgeline.cli.doctor import DoctorConfig, doctor
from ridgeline.cli.stage import Context, Result, Stage
from ridgeline.cli.tables import number
from ridgeline.report.section import Section, Table


def run(context: Context) -> Result:
    """The facts and ceilings of the device in use."""
    name = "cuda" if context.device == "cuda" else "cpu"
    facts = doctor(DoctorConfig(device=name, budget_s=0.5))
    return {
        "ridgeline": facts["ridgeline"],
        "machine": facts["machine"],
        "versions": facts["versions"],
        "device": facts["devices"][0],
    }


def say(result: Result) -> str:
    """Ceilings in a line."""
    ceilings = result["device"]["ceilings"]
    rates = ", ".join(f"{d} {number(v)} TFLOP/s" for d, v in ceilings["matmul_tflops"].items())
    return f"{result['device']['name']}: read {number(ceilings['read_gbps'])} GB/s, {rates}"


def section(result: Result, context: Context) -> Section:
    """The machine's ceilings and the implementations in use."""
    device = result["device"]
    ceilings = device["ceilings"]
    return Section(
        title="The machine",
        paragraphs=(
            f"{device['name']} ({device['arch']}). Every share of a ceiling below is of these "
            f"figures, {ceilings['source']}; each is the best of repeated runs.",
        ),
        facts=(
            ("read, GB/s", number(ceilings["read_gbps"])),
            ("copy, GB/s", number(ceilings["copy_gbps"])),
            *(
                (f"matmul {dtype}, TFLOP/s", number(rate))
                for dtype, rate in ceilings["matmul_tflops"].items()
            ),
        ),
        tables=(
            Table(
                header=("op", "implementation", "takes its typical problem here"),
                rows=tuple(
                    (
                        row["op"],
                        row["impl"],
                        ", ".join(row["dtypes"]) if row["available"] else f"no: {row['refusal']}",
                    )
                    for row in device["impls"]
                ),
            ),
        ),
    )


STAGE = Stage(
    name="machine", order=10, title="measure this machine", run=run, section=section, say=say
)
