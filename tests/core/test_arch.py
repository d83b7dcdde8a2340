from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core import arch, dims, dtypes, roofline
from ridgeline.core.arch import Ceilings


def test_pretend_and_its_error():
    assert arch.pretend("sm90").num_units == 132
    with pytest.raises(ValueError, match=r"arch: name must be one of cpu, .*got 'sm91'"):
        arch.pretend("sm91")


def test_detect_cpu_sees_this_machine(cache):
    found = arch.detect("cpu")
    assert found.name == "cpu" and found.num_units >= 1 and not found.ceilings.measured
    assert found.memory_bytes > 2**28
    with pytest.raises(ValueError, match="device must be cpu or cuda, got tpu"):
        arch.detect("tpu")


def test_measured_ceilings_are_kept_and_found(cache):
    found = arch.detect("cpu")
    measured = Ceilings(
        read_gbps=12.5,
        copy_gbps=10.0,
        matmul_tflops={"float32": 0.25},
        source="this machine",
        measured=True,
    )
    arch.save_ceilings(found, measured)
    assert arch.detect("cpu").ceilings == measured
    busy = replace(measured, read_gbps=20.0, matmul_tflops={"float32": 0.01, "bfloat16": 0.5})
    arch.save_ceilings(found, busy)
    assert arch.detect("cpu").ceilings == replace(
        measured, read_gbps=20.0, matmul_tflops={"float32": 0.25, "bfloat16": 0.5}
    )
    other = replace(found, device="another CPU")
    assert arch.load_ceilings(other) is None


def test_a_broken_ceilings_file_is_ignored(cache):
    found = arch.detect("cpu")
    arch.save_ceilings(found, found.ceilings)
    (kept,) = (cache / "ceilings").iterdir()
    kept.write_text("{")
    assert arch.load_ceilings(found) is None


def test_nearest_known_family():
    assert arch._nearest_family(9, 0) == "sm90"
    assert arch._nearest_family(8, 7) == "sm86"
    assert arch._nearest_family(12, 0) == "sm100"
    assert arch._nearest_family(7, 5) == "sm80"


def test_roofline_arithmetic():
    ceilings = arch.pretend("sm90").ceilings
    cost = roofline.Cost(flops=790e12, bytes=4350e9) + roofline.Cost(flops=0, bytes=4350e9)
    found = roofline.floor(cost, ceilings, "bfloat16")
    assert (found.compute_us, found.memory_us) == (pytest.approx(1e6), pytest.approx(2e6))
    assert found.bound == "memory" and found.us == pytest.approx(2e6)
    assert roofline.ridge(ceilings, "bfloat16") == pytest.approx(790e12 / 4350e9)
    assert cost.intensity == pytest.approx(790e12 / 8700e9)


def test_a_dtype_that_was_not_measured_takes_a_wider_ones_ceiling():
    ceilings = arch.pretend("sm90").ceilings
    assert ceilings.tflops("float8_e5m2") == ceilings.tflops("bfloat16")
    assert ceilings.tflops("float8_e4m3fn") == 1500.0


def test_legend():
    assert dims.describe("MK") == "GEMM rows (tokens) x GEMM reduction (input features)"
    with pytest.raises(ValueError, match="'x' is not one"):
        dims.describe("BxD")


def test_dtypes():
    import torch

    assert dtypes.canonical("bf16") == "bfloat16"
    assert dtypes.torch_dtype("fp16") is torch.float16
    for name, size in dtypes.ITEMSIZE_BYTES.items():
        assert dtypes.torch_dtype(name).itemsize == size == dtypes.itemsize_bytes(name)
        assert dtypes.dtype_name(dtypes.torch_dtype(name)) == name
    with pytest.raises(ValueError, match="got 'int3'"):
        dtypes.canonical("int3")


def test_the_highest_cache_level_counts(tmp_path, monkeypatch):
    for index, (level, size) in enumerate([(1, "32K"), (3, "96M"), (2, "512K"), (3, "64M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    (tmp_path / "index9").mkdir()  # states nothing
    assert arch._last_level_bytes(str(tmp_path)) == 96 * 2**20
    assert arch._last_level_bytes(str(tmp_path / "index9")) is None
    monkeypatch.setattr(arch, "_last_level_bytes", lambda: 48 * 2**20)
    assert arch._detect_cpu().l2_bytes == 48 * 2**20
    monkeypatch.setattr(arch, "_last_level_bytes", lambda: None)
    assert arch._detect_cpu().l2_bytes == 32 * 2**20
