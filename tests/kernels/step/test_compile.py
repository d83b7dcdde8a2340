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

from ridgeline.kernels.step import triton_attend, triton_rows

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]


def compiled(config: triton_rows.RowsConfig, K: int, *, norm: bool, gated: bool):
    flags = {"NORM": norm, "HAS_DELTA": norm, "GATED": gated, "HAS_BIAS": False}
    sizes = {"K": K, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    given = flags | sizes | {"STAGES": config.num_stages, "OVERLAP": config.overlap}
    kinds = {"N": "i32", "eps": "fp32"}
    return for_hopper(triton_rows._rows, given, kinds, config.num_warps, config.overlap)


def for_hopper(function, given: dict, kinds: dict[str, str], num_warps: int, overlap: bool):
    """A kernel with these constants; kinds: of arguments that are no bf16 tensors."""
    names = function.arg_names
    kinds = kinds | dict.fromkeys(given, "constexpr")
    source = ASTSource(
        fn=function,
        signature={name: kinds.get(name, "*bf16") for name in names},
        constexprs={(names.index(name),): value for name, value in given.items()},
        attrs={(i,): ALIGNED for i, name in enumerate(names) if kinds.get(name, "i32") == "i32"},
    )
    options = {"num_warps": num_warps, "launch_pdl": overlap}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(made, folder: Path) -> str:
    """Its instructions and what it takes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [str(NVIDIA / "cuobjdump"), "-res-usage", "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("config", triton_rows.CANDIDATES[:2])
def test_weights_come_before_the_wait(tmp_path, config):
    made = compiled(replace(config, overlap=True), 4096, norm=True, gated=True)
    said = machine_code(made, tmp_path)
    assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", said)) == {"0"}
    # PREEXIT lets the next kernel start, ACQBULK waits for the previous one.
    order = re.findall(r"\b(PREEXIT|LDG\.E\.EF|ACQBULK|LDG\.E\.EL|STG)", said)
    wait = order.index("ACQBULK")
    assert order[0] == "PREEXIT" and set(order[1:wait]) == {"LDG.E.EF"}
    assert wait > 8 and order.index("LDG.E.EL") > wait and order.index("STG") > wait


def test_nothing_waits_where_not_overlapped():
    made = compiled(triton_rows.DEFAULT, 1024, norm=False, gated=False)
    assert "griddepcontrol" not in made.asm["ptx"]


def test_a_short_sequences_keys_come_before_the_wait(tmp_path):
    """All 256 keys and values of a head, in registers, none spilt; idle programs ask."""
    config = next(each for each in triton_attend.CANDIDATES if each.near == 256)
    sizes = {"G": 8, "GROUP": 4, "ROWS": 16, "D": 128, "BLOCK_HALF": 64, "BLOCK_D": 128, "W": 128}
    cut = {"BLOCK_N": config.block_n, "SPLITS": config.splits}
    cut |= {"NEAR": 256, "REACH": 1024, "NEAR_RANGES": 4}
    flags = {"WINDOW": 0, "NORM": False, "PRECISION": None, "OVERLAP": True}
    asked = {"ASKED": 2, "PIECE": 512, "THREADS": 32 * config.num_warps}
    kinds = dict.fromkeys(("cos_ptr", "sin_ptr", "part_ptr", "lse_ptr"), "*fp32")
    kinds |= dict.fromkeys(("keys_ptr", "table_ptr", "count_ptr"), "*i32")
    kinds |= dict.fromkeys(("stride_qkv", "stride_keys", "stride_table"), "i32")
    kinds |= {f"a{i}_ptr": "*u8" for i in range(4)} | {f"a{i}_bytes": "i32" for i in range(4)}
    kinds |= dict.fromkeys(("scale_log2", "eps"), "fp32")
    given = sizes | cut | flags | asked
    function = triton_attend._decode_attention
    made = for_hopper(function, given, kinds, config.num_warps, overlap=True)
    said = machine_code(made, tmp_path)
    assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", said)) == {"0"}
    order = re.findall(r"\b(PREEXIT|LDG\.E\.128|UBLKPF|ACQBULK)", said)
    near = order[: order.index("ACQBULK")]  # the first of the two ways to cut a sequence
    assert near[0] == "PREEXIT" and order.count("UBLKPF") >= 2
    keys_and_values = 256 * 2 * 128 * 2
    never = {"NEAR": 0, "REACH": 0, "NEAR_RANGES": 0}
    assert for_hopper(function, given | never, kinds, 4, overlap=True)  # compiles too
    assert near.count("LDG.E.128") >= keys_and_values // (16 * 32 * config.num_warps)
