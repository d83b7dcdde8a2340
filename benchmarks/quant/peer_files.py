"""Small files of other libraries' own packers, for tests/formats: run in the environments that
bench_quantize.py --peers makes.

    <llm-compressor's python> benchmarks/quant/peer_files.py compressed-tensors tests/formats/peers
    <GPTQModel's python> benchmarks/quant/peer_files.py gptqmodel tests/formats/peers

One safetensors a case: the tensors of one layer as the library packs them, and `code`, `zero`,
`scale`, `group` as they went in. Weights are scale * (code - zero), so that the library's own
rounding can only find these codes again.
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

N, K, GROUP = 32, 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer that its codes stand for exactly."""

    bits: int
    symmetric: bool
    shuffled: bool = False
    """Whether inputs take their groups out of order."""

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.bits * 2 + self.symmetric)
        code = torch.randint(0, 2**self.bits, (N, K), generator=generator)
        zero = torch.randint(1, 2**self.bits, (N, K // GROUP), generator=generator)
        if self.symmetric:
            zero.fill_(2 ** (self.bits - 1))
        scale = torch.rand(zero.shape, generator=generator) * 0.1 + 0.01
        order = torch.randperm(K, generator=generator) if self.shuffled else torch.arange(K)
        return {
            "code": code.to(torch.uint8),
            "zero": zero.to(torch.uint8),
            "scale": scale.half(),
            "group": (order // GROUP).to(torch.int32),
        }

    def name(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits}_{kind}" + ("_shuffled" if self.shuffled else "")


def weight_of(given: dict[str, torch.Tensor]) -> torch.Tensor:
    group = given["group"].long()
    difference = given["code"].float() - given["zero"].float()[:, group]
    return given["scale"].float()[:, group] * difference


def by_compressed_tensors(layer: Layer, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=layer.bits, type="int", symmetric=layer.symmetric, strategy="group",
        group_size=GROUP,
    )  # fmt: skip
    zero = given["zero"].to(torch.int16) - 2 ** (layer.bits - 1)
    state = {
        "weight": weight_of(given),
        "weight_scale": given["scale"].float(),
        "weight_zero_point": zero.to(torch.int8),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    made = PackedQuantizationCompressor.compress(state, scheme)
    return {**made, "weight_scale": given["scale"]}


def by_gptqmodel(layer: Layer, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Zeros as they are (v2); v1 stores them less one."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    made = TorchLinear(
        bits=layer.bits, group_size=GROUP, sym=layer.symmetric, desc_act=layer.shuffled,
        in_features=K, out_features=N,
    )  # fmt: skip
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight_of(given)
    made.pack_block(linear, given["scale"].float(), given["zero"].float(), given["group"])
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}


def main() -> None:
    library, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    layers = [Layer(bits=4, symmetric=True), Layer(bits=4, symmetric=False)]
    if library == "gptqmodel":
        layers += [Layer(bits=3, symmetric=False), Layer(bits=4, symmetric=True, shuffled=True)]
        pack = by_gptqmodel
    else:
        layers += [Layer(bits=8, symmetric=False)]
        pack = by_compressed_tensors
    by = f"{library} {importlib.metadata.version(library)}"
    for layer in layers:
        given = layer.tensors()
        tensors = {**pack(layer, given), **given}
        tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        file = out / f"{library.replace('-', '_')}_{layer.name()}.safetensors"
        save_file(tensors, file, {"by": by})
        print(file)


if __name__ == "__main__":
    main()
