"""Machine code of the Hopper W4A16 kernels, compiled without a GPU: hopper_code.py says what it
must hold. One of each family by default; all that the shipped layers ask for: `-m slow`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.cli.warmup import WarmupConfig, layer_kernels
from ridgeline.core.arch import pretend
from ridgeline.kernels.w4a16 import config as configs
from ridgeline.kernels.w4a16 import cute_library
from ridgeline.kernels.w4a16.cute_cache import kernel_name
from ridgeline.kernels.w4a16.problem import W4A16Problem
from ridgeline.kernels.w4a16.tiles_trimmed import TrimmedConfig
from tests import hopper_code

H200 = pretend("sm90")
LAYER = W4A16Problem(m=1, n=4096, k=4096, group_size=128, scale_dtype="float16")


def config_of(**changes: Any) -> Any:
    return configs.launch_for(replace(LAYER, **changes), H200).config


FEW = {
    "decode": config_of(m=8, n=14336),
    "decode-fp16-asymmetric": config_of(
        m=8, n=14336, dtype="float16", group_size=64, symmetric=False
    ),
    "stream": config_of(m=16),
    "matmul": config_of(m=512),
    "matmul-cluster": config_of(m=32, scale_dtype="bfloat16"),
    "trimmed": TrimmedConfig(
        kind="f16", scale="f16", packed_group=64, rows=128, stages=4, rest_stages=4
    ),
}


def shipped() -> dict[str, Any]:
    """Every kernel that the layers of `ridgeline warmup` ask for, symmetric and not."""
    found = {}
    for layer in WarmupConfig().layers:
        k, n = map(int, layer.split("x"))
        for symmetric in (True, False):
            for config in layer_kernels(replace(LAYER, n=n, k=k, symmetric=symmetric), H200):
                found[kernel_name(config)] = config
    return dict(sorted(found.items()))


ALL = [pytest.param(config, id=name) for name, config in FEW.items()]
ALL += [pytest.param(c, id=name, marks=pytest.mark.slow) for name, c in shipped().items()]


# Long unrolled loops are meant, as registers are indexed by constants only. The newer name of the
# other would be another source, so new kernels in every cache.
@pytest.mark.filterwarnings("ignore:This static loop has")
@pytest.mark.filterwarnings("ignore:warpgroup.OperandMajorMode is deprecated:DeprecationWarning")
@pytest.mark.parametrize("config", ALL)
def test_machine_code(config: Any, cache: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))):
        pytest.skip("no linker here")
    hopper_code.check(hopper_code.code_of(cute_library.compile_kernel(config)), config)


def test_families() -> None:
    """The few are of all kinds."""
    kinds = {name.split("-")[0]: type(config).__name__ for name, config in FEW.items()}
    assert kinds == {
        "decode": "DecodeConfig",
        "stream": "StreamConfig",
        "matmul": "MatmulConfig",
        "trimmed": "TrimmedConfig",
    }
    assert FEW["matmul-cluster"].cluster > 1 and FEW["matmul"].reallocates
