"""Files that other libraries packed (benchmarks/quant/peer_files.py wrote them in their own
environments), read by ours and written again bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.gptq import GPTQFormat

FILES = sorted((Path(__file__).parent / "peers").glob("*.safetensors"))
GIVEN = ("code", "zero", "scale", "group")


def test_every_library_is_there():
    assert [file.stem for file in FILES] == [
        "compressed_tensors_4_asymmetric",
        "compressed_tensors_4_symmetric",
        "compressed_tensors_8_asymmetric",
        "gptqmodel_3_asymmetric",
        "gptqmodel_4_asymmetric",
        "gptqmodel_4_symmetric",
        "gptqmodel_4_symmetric_shuffled",
    ]
    for file in FILES:
        with safe_open(file, "pt") as opened:
            library, version = opened.metadata()["by"].split()
        assert library.replace("-", "_") in file.stem and version[0].isdigit()


def form_of(name: str) -> CompressedTensorsFormat | GPTQFormat:
    bits, symmetric = int(name.split("_")[-2 - ("shuffled" in name)]), "_symmetric" in name
    if name.startswith("compressed"):
        return CompressedTensorsFormat(bits=bits, group_size=64, symmetric=symmetric)
    return GPTQFormat(
        bits=bits,
        group_size=64,
        symmetric=symmetric,
        desc_act="shuffled" in name,
        checkpoint_format="gptq_v2",
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_reads_what_went_in_and_writes_the_same_words(file):
    stored = load_file(file)
    given = {name: stored.pop(name) for name in GIVEN}
    form = form_of(file.stem)
    weight = form.unpack(stored)
    assert torch.equal(weight.code_NK, given["code"])
    assert torch.equal(weight.scale_NR, given["scale"])
    middle = torch.full_like(given["zero"], 2 ** (form.bits - 1))
    zero = middle if weight.zero_NR is None else weight.zero_NR
    assert torch.equal(zero, given["zero"])
    assert torch.equal(weight.groups_K().to(torch.int32), given["group"])
    group = given["group"].long()
    exact = given["code"].float() - given["zero"].float()[:, group]
    assert torch.equal(weight.dequantize().float(), given["scale"].float()[:, group] * exact)
    again = form.pack(weight)
    assert again.keys() == stored.keys()
    for name, tensor in again.items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
