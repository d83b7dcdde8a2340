"""The column kernel compiled for an H200 without one: nothing spills."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from ridgeline.core import env

if importlib.util.find_spec("triton") is None or env.triton_interpreted():
    pytest.skip("needs the Triton compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.kernels.gptq_columns.triton import BLOCK_N, _columns_kernel

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.mark.parametrize("steps", [16, 128])
def test_no_spills_on_sm90(tmp_path, steps):
    kinds = {"group_ptr": "*i32", "max_code": "fp32"}
    kinds |= {"BLOCK_B": "constexpr", "BLOCK_N": "constexpr"}
    names = _columns_kernel.arg_names
    signature = {n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names}
    source = ASTSource(
        fn=_columns_kernel, signature=signature, constexprs={"BLOCK_B": steps, "BLOCK_N": BLOCK_N}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".target sm_90a" in made.asm["ptx"]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [str(NVIDIA / "cuobjdump"), "-res-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    assert usage["STACK"] == usage["LOCAL"] == "0" and int(usage["REG"]) <= 128
