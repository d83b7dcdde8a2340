"""quack's gemm_w4a16 as shared libraries, for a GPU host where its compiler cannot be installed.

    python benchmarks/kernels/w4a16/quack_peer.py --out FOLDER [--shapes 4096x4096] [--rows 1,16]

compiles, without a GPU, the kernel that quack (0.6.5, with its own choice of tile and split) takes
for each layer and number of rows, and writes FOLDER/quack.json: which kernel a cell takes, how it
is launched, and how codes and scales lie in a 64 x 64 block (found by asking its own `prepare`).
`Exported` runs them with apache-tvm-ffi alone. Its kernels have the layer's N and K compiled in.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
from typing import Any

import torch

VERSION = "0.6.5"
BLOCK = 64
UNSPLIT = (torch.empty(0, 0, 0), torch.empty(0, 0, 0, 0))
SMS = 132
"""Of an H200; quack's persistent grid is as large."""


class Exported:
    """quack's kernels from a folder of `export`."""

    name = f"quack {VERSION}"

    def __init__(self, folder: pathlib.Path) -> None:
        # only where the kernels run
        import tvm_ffi

        from ridgeline.kernels.w4a16 import cute_library

        cute_library.load_runtime()
        self.ffi = tvm_ffi
        self.folder = folder
        found = json.loads((folder / "quack.json").read_text())
        self.cells = {(c["k"], c["n"], c["m"]): c for c in found["cells"]}
        self.code_order = torch.tensor(found["code_order"], device="cuda")
        self.scale_order = torch.tensor(found["scale_order"], device="cuda")
        self.functions: dict[str, Any] = {}

    def has(self, k: int, n: int, m: int) -> bool:
        return (k, n, m) in self.cells

    def layer(self, k: int, n: int, copies: int) -> None:
        """Random weights in quack's layout, and their dequantized values."""
        code_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scale_NR = (torch.rand(n, k // 128, device="cuda") * 0.01 + 0.005).bfloat16()
        wide = (code_NK.float() - 8) * scale_NR.float().repeat_interleave(128, 1)
        self.dense = wide.bfloat16()
        blob, strip = pack(code_NK, scale_NR, self.code_order, self.scale_order)
        self.weights = [(blob.clone(), strip.clone()) for _ in range(copies)]

    def function(self, name: str) -> Any:
        if name not in self.functions:
            module = self.ffi.load_module(str(self.folder / f"{name}.so"))
            self.functions[name] = module["func"]
        return self.functions[name]

    def calls(self, act: torch.Tensor, count: int) -> list:
        """One call a copy of the weight."""
        m, k = act.shape
        n = self.dense.shape[0]
        cell = self.cells[k, n, m]
        function = self.function(cell["kernel"])
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        epilogue: list[Any] = [None if x is None else 1.0 for x in cell["epilogue"]]
        if cell["split_k"] > 1:
            flags = torch.zeros(cell["flags"], dtype=torch.int32, device="cuda")
            sums = torch.empty(cell["sums"], dtype=torch.float32, device="cuda")
            epilogue[-2:] = [flags.permute(1, 2, 0), sums.permute(3, 1, 2, 0)]

        def call(blob: torch.Tensor, strip: torch.Tensor) -> Any:
            bundle = (blob.as_strided(*cell["blob"]), strip.as_strided(*cell["strip"]))
            rest = (tuple(epilogue), tuple(cell["scheduler"]), None, None, None)

            def run() -> torch.Tensor:
                with self.ffi.use_torch_stream(torch.cuda.current_stream()):
                    function(bundle, act, out, None, *rest)
                return out

            return run

        return [call(*w) for w in self.weights[:count]]

    def error(self, act: torch.Tensor) -> float:
        """Relative Frobenius error against an fp32 product."""
        want = act.float() @ self.dense.float().T
        got = self.calls(act, 1)[0]().float()
        return float((got - want).norm() / want.norm())


def pack(
    code_NK: torch.Tensor,
    scale_NR: torch.Tensor,
    code_order: torch.Tensor,
    scale_order: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of the codes, bytes of the scales), flat, block after block along K."""
    n, k = code_NK.shape
    blocks = code_NK.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK).transpose(1, 2)
    ordered = blocks.reshape(-1, BLOCK * BLOCK)[:, code_order].view(-1, 2)
    scale_NC = scale_NR.repeat_interleave(k // BLOCK // scale_NR.shape[1], 1)
    strips = scale_NC.view(n // BLOCK, BLOCK, k // BLOCK).transpose(1, 2)
    strip = strips.reshape(-1, BLOCK)[:, scale_order].contiguous()
    return ordered[:, 0] | ordered[:, 1] << 4, strip.view(torch.uint8).flatten()


def export(out: pathlib.Path, shapes: list[tuple[int, int]], rows: list[int]) -> None:
    """Compile every cell's kernel (no GPU) and describe it."""
    settings = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_ENABLED": "0"}
    os.environ.update(settings, CUDA_VISIBLE_DEVICES="")  # read as quack is imported
    import quack.cache.async_compile as compiling
    import quack.gemm_runtime.host as host
    from quack.gemm_w4 import gemm_w4a16
    from quack.operand_transform.formats import decode_format

    compiling._install_gpu_blind_device_attrs()
    compiling._pin_dsl_arch("sm_90a")
    host.get_max_active_clusters = lambda *_args, **_kwargs: SMS
    launched: list[tuple] = []
    host.launch_gemm = lambda *arguments: launched.append(arguments)
    fmt = decode_format("int4")
    codes, scales = block_orders(fmt)
    out.mkdir(parents=True, exist_ok=True)
    cells = []
    for k, n in shapes:
        blob = torch.zeros(n // 64, k // 64, 128, 16, dtype=torch.uint8)
        strip = torch.zeros(n // 64, k // 64, 32, 2, dtype=torch.bfloat16)
        for m in rows:
            gemm_w4a16(torch.zeros(m, k, dtype=torch.bfloat16), blob, strip, wformat="int4")
            plan, bundle, _, _, _, epilogue, scheduler = launched.pop()[:7]
            fields = [getattr(x, "value", x) for x in epilogue]
            flags, sums = fields[-2:] if plan.split_k > 1 else UNSPLIT
            name = f"quack_{k}x{n}_{plan.tile_M}x{plan.tile_N}_{plan.split_k}"
            if not (out / f"{name}.so").exists():
                link(plan.compiled_fn, out / f"{name}.so")
            cells.append({
                "k": k, "n": n, "m": m, "kernel": name, "split_k": plan.split_k,
                "tile": [plan.tile_M, plan.tile_N],
                "flags": list(flags.permute(2, 0, 1).shape),
                "sums": list(sums.permute(3, 1, 2, 0).shape),
                "epilogue": [None if x is None else 1.0 for x in fields],
                "scheduler": [getattr(x, "value", x) for x in scheduler],
                "blob": [list(bundle.blob.shape), list(bundle.blob.stride())],
                "strip": [list(bundle.sf.shape), list(bundle.sf.stride())],
            })  # fmt: skip
            print(k, n, m, name, flush=True)
        described = {"version": VERSION, "code_order": codes, "scale_order": scales, "cells": cells}
        (out / "quack.json").write_text(json.dumps(described))


def block_orders(fmt: Any) -> tuple[list[int], list[int]]:
    """Which code (row 64 + column) each nibble of a block is, and which row each of its scales."""
    at = torch.arange(BLOCK * BLOCK).view(BLOCK, BLOCK).repeat(2, 1)
    found = torch.zeros(BLOCK * BLOCK, dtype=torch.int64)
    scale = torch.arange(BLOCK, dtype=torch.float32).repeat(2)[:, None].bfloat16()
    for digit in range(3):
        code = (at >> (4 * digit) & 15).to(torch.uint8)
        code = torch.cat([code, torch.zeros_like(code)], 1)
        blob, strip = fmt.prepare(code[:, ::2] | code[:, 1::2] << 4, scale)
        first = blob[0, 0].flatten()
        nibbles = torch.stack([first & 15, first >> 4], 1).flatten()
        found += nibbles.long() << (4 * digit)
    assert sorted(found.tolist()) == list(range(BLOCK * BLOCK))
    return found.tolist(), strip[0, 0].flatten().long().tolist()


def link(compiled: Any, target: pathlib.Path) -> None:
    """A kernel as a shared library."""
    import nvidia_cutlass_dsl

    object_file = target.with_suffix(".o")
    compiled.export_to_c(object_file_path=str(object_file), function_name="func")
    root = pathlib.Path(next(iter(nvidia_cutlass_dsl.__path__)))
    runtime = sorted(root.glob("cu*/lib/libcute_dsl_runtime.so"))[-1]
    command = ["cc", "-shared", "-fPIC", "-o", str(target), str(object_file), str(runtime)]
    subprocess.run(command, check=True)
    object_file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--shapes", required=True, help="KxN, comma between")
    parser.add_argument("--rows", required=True)
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in args.shapes.split(",")]
    export(args.out, shapes, [int(m) for m in args.rows.split(",")])


if __name__ == "__main__":
    main()
