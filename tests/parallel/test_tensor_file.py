"""Our writer of safetensors files against the format's own reader."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ridgeline.parallel import tensor_file
from ridgeline.parallel.storage import file_facts
from ridgeline.parallel.tensor_file import cut_in_parts, write_tensors

DTYPES = list(tensor_file._DTYPES)


def test_what_is_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "_SLICE_BYTES", 5)  # slices end inside values
    tensors = {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES}
    tensors['an odd name: \u00e9, "'] = torch.randn(3, 5).T
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "cut": torch.randn(9)[::2]}
    facts = write_tensors(tmp_path / "ours.safetensors", tensors)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert facts == file_facts(tmp_path / "ours.safetensors")


def test_it_is_the_file_that_the_package_writes(tmp_path):
    tensors = {"b": torch.randn(3), "a": torch.randn(2, 2), "c": torch.arange(3)}
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_tensors(tmp_path):
    write_tensors(tmp_path / "empty", {})
    with safe_open(tmp_path / "empty", framework="pt") as file:
        assert list(file.keys()) == []


def test_a_dtype_without_a_name_is_an_error(tmp_path):
    with pytest.raises(KeyError):
        write_tensors(tmp_path / "x", {"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("sizes", [[], [1], [300, 20, 20, 100, 90, 95], [8] * 40])
def test_parts_hold_all_and_are_about_equal(monkeypatch, sizes):
    monkeypatch.setattr(tensor_file, "PART_BYTES", 400)
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    parts = cut_in_parts(tensors)
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    held = [sum(map(tensor_file.tensor_bytes, part.values())) for part in parts]
    total = sum(held)
    assert len(parts) == max(1, min(8, -(-total // 400), len(sizes)))
    assert max(held) - min(held) <= 4 * max(sizes, default=0)
