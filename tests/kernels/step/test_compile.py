"""A row's kernels compiled for an H200 without one: nothing spills, and an overlapped kernel asks
for weights, waits for the previous kernel, then reads what that wrote."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core import env

if importlib.util.find_spec("triton") is None or env.triton_interpreted():
    pytest.skip("needs the Triton compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.kernels.step import triton_rows

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]


def compiled(config: triton_rows.RowsConfig, K: int, *, norm: bool, gated: bool):
    flags = {"NORM": norm, "HAS_DELTA": norm, "GATED": gated, "HAS_BIAS": False}
    sizes = {"K": K, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    given = flags | sizes | {"STAGES": config.num_stages, "OVERLAP": config.overlap}
    names = triton_rows._rows.arg_names
    kinds = {"N": "i32", "eps": "fp32"} | dict.fromkeys(given, "constexpr")
    source = ASTSource(
        fn=triton_rows._rows,
        signature={name: kinds.get(name, "*bf16") for name in names},
        constexprs={(names.index(name),): value for name, value in given.items()},
        attrs={(i,): ALIGNED for i, name in enumerate(names) if kinds.get(name, "i32") == "i32"},
    )
    options = {"num_warps": config.num_warps, "launch_pdl": config.overlap}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("config", triton_rows.CANDIDATES[:2])
def test_weights_come_before_the_wait(tmp_path, config):
    made = compiled(replace(config, overlap=True), 4096, norm=True, gated=True)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [str(NVIDIA / "cuobjdump"), "-res-usage", "-sass", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", said)) == {"0"}
    # PREEXIT lets the next kernel start, ACQBULK waits for the previous one.
    order = re.findall(r"\b(PREEXIT|LDG\.E\.EF|ACQBULK|LDG\.E\.EL|STG)", said)
    wait = order.index("ACQBULK")
    assert order[0] == "PREEXIT" and set(order[1:wait]) == {"LDG.E.EF"}
    assert wait > 8 and order.index("LDG.E.EL") > wait and order.index("STG") > wait


def test_nothing_waits_where_not_overlapped():
    made = compiled(triton_rows.DEFAULT, 1024, norm=False, gated=False)
    assert "griddepcontrol" not in made.asm["ptx"]
