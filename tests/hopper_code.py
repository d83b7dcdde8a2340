"""What the machine code of a compiled Hopper kernel must hold, whatever the kernel.

Nothing spilled (W4A16: little); the registers that the launch leaves a thread; setmaxnreg with the
numbers of the config, once a role (asking for more than the launch has hangs); every product there
once a place, and waits only where they are written: when ptxas cannot prove a pipeline sound, it
serialises it and waits after each HGMMA. A kernel's library holds its cubin, an ELF file inside an
ELF file.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_cached_config as cached
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention import cute_sm90_roles_config as roles
from ridgeline.kernels.w4a16.tiles import DecodeConfig, MatmulConfig
from ridgeline.kernels.w4a16.tiles_stream import StreamConfig
from ridgeline.kernels.w4a16.tiles_trimmed import TrimmedConfig

_EM_CUDA = 190
_VECTOR_ADD = r"\bREDG?\.E\.ADD\.F32x4|\bREDG?\b.*\.128"


@dataclass(frozen=True, slots=True)
class Code:
    """The kernels of a library."""

    registers: tuple[int, ...]
    """Of each kernel: those at launch."""
    stack_bytes: tuple[int, ...]
    sass: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    def exponentials_under_products(self) -> int:
        """Those with a product before them and no wait for it between."""
        found = re.findall(r"\b(HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2)\b", self.sass)
        last, count = "", 0
        for what in found:
            if what == "MUFU.EX2":
                count += last == "HGMMA"
            else:
                last = what
        return count

    def shortest_step(self) -> int:
        """Instructions of the shortest loop with products and exponentials: a step that needs no
        mask."""
        line = r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*) ?(.*?) ?;"
        found = [(int(at, 16), *rest) for at, *rest in re.findall(line, self.sass, re.M)]
        place = {one[0]: index for index, one in enumerate(found)}
        lengths = []
        for index, (at, _, name, operands) in enumerate(found):
            target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
            if target is None or int(target[1], 16) >= at:
                continue
            body = found[place[int(target[1], 16)] : index + 1]
            names = {one[2].split(".64x")[0] for one in body}
            if {"HGMMA", "MUFU.EX2"} <= names:
                lengths.append(len(body))
        return min(lengths)

    @property
    def moved(self) -> list[int]:
        """What setmaxnreg asks for, ascending."""
        found = re.findall(r"\bUSETMAXREG\b[^;]*?0x([0-9a-f]+)", self.sass)
        return sorted(int(number, 16) for number in found)


def code_of(library: Path) -> Code:
    """The machine code of a kernel's library."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin_of(library.read_bytes()))
        usage, sass = (_dump(file, what) for what in ("-res-usage", "-sass"))
    found = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = zip(*[(int(a), int(b)) for a, b in found], strict=True)
    return Code(registers, stack, sass)


def cubin_of(data: bytes) -> bytes:
    """The ELF file for the GPU inside a library."""
    at = data.find(b"\x7fELF", 1)
    while at > 0 and struct.unpack_from("<H", data, at + 18)[0] != _EM_CUDA:
        at = data.find(b"\x7fELF", at + 1)
    assert at > 0, "no cubin in the library"
    ends = [0]
    for table, sizes in ((32, 54), (40, 58)):  # of segments, of sections
        offset = struct.unpack_from("<Q", data, at + table)[0]
        size, count = struct.unpack_from("<HH", data, at + sizes)
        ends.append(offset + size * count)
    return data[at : at + max(ends)]


def _dump(cubin: Path, what: str) -> str:
    command = [_cuobjdump(), what, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cuobjdump() -> str:
    if found := shutil.which("cuobjdump"):
        return found
    triton = pytest.importorskip("triton", reason="no cuobjdump here, and no Triton, which has one")
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def check(code: Code, *key: Any) -> None:
    """A kernel's machine code against its compile key: (traits, config), or a W4A16 config."""
    spilled = code.count(r"\b(?:LDL|STL)\b")
    most = most_stack_bytes(*key)
    assert max(code.stack_bytes) <= most, f"{code.stack_bytes} bytes of stack, {spilled} spills"
    assert most or not spilled, f"{spilled} spills"
    config = key[-1]
    for kind, checks in _CHECKS.items():
        if isinstance(config, kind):
            checks(code, *key)
            return
    raise AssertionError(f"no check for {type(config).__name__}")


def most_stack_bytes(*key: Any) -> int:
    """Some W4A16 kernels put up to 88 bytes a thread on the stack, most of them tiles of 64 rows
    with two blocks a multiprocessor (and a plan that only tests ask for 128). Attention none, but
    for softcap at head dim 64 (three warpgroups with 96 are 7 % faster than two with none), and
    where warps of 32 registers compute statistics or round dQ: outside of their loops over rows."""
    config, traits = key[-1], key[0]
    if isinstance(config, bwd.BackwardConfig):
        return 64 if config.statistics_ahead else 24 if config.results_behind else 0
    if isinstance(config, cfg.ForwardConfig) and config.num_warpgroups == 3:
        return 96 if traits.softcap else 0
    return 128 if isinstance(config, DecodeConfig | StreamConfig | MatmulConfig) else 0


def at_launch(threads: int, blocks: int = 1) -> int:
    """The most registers a thread that so many threads, and blocks, of a multiprocessor leave."""
    return min(255, bwd.REGISTER_FILE // (threads * blocks) // 8 * 8)


def _forward(code: Code, traits: cfg.ForwardTraits, config: cfg.ForwardConfig) -> None:
    (registers,) = code.registers
    assert registers <= at_launch(128 * (1 + config.num_warpgroups))
    assert code.moved == sorted(cfg.registers(config, traits))
    qk, pv = traits.head_dim // 16, config.block_k // 16
    steps = 3 if traits.has_left else 2  # masked, unmasked, and the window's left edge
    walks = 2 if config.split_tail else 1  # of whole tiles, of pieces
    assert code.count(r"\bHGMMA\b") == qk + walks * (qk + steps * (qk + pv) + pv)
    assert code.count(r"WARPGROUP\.DEPBAR") <= walks * (3 * steps + 2) + 2
    # Draws, ends, and pieces: counted by one thread, read as L2 has them.
    assert code.count(r"\bATOMG\b") == 2 * config.persistent + config.split_tail
    assert bool(code.count(r"\bLDG\.E\.128\.STRONG\.GPU\b")) == config.split_tail
    assert code.count(r"\bUTMALDG\b") and code.count(r"\bUTMASTG\b")


def _cached(code: Code, traits: cached.CachedTraits, config: cached.CachedConfig) -> None:
    """TMA reads K and V only, box by box where there are pages; Q goes by 16 bytes into swizzled
    shared memory."""
    assert len(code.registers) == 1 + traits.split
    threads = 128 * (1 + config.num_warpgroups)
    assert max(code.registers) <= at_launch(threads, config.blocks_per_sm)
    assert code.moved == sorted(cached.moved_registers(config) or ())
    qk, pv = traits.head_dim // 16, config.block_k // 16
    steps = 3 if traits.has_left else 2
    assert code.count(r"\bHGMMA\b") == qk + steps * (qk + pv) + pv
    assert code.count(r"WARPGROUP\.DEPBAR") <= 3 * steps + 2
    boxes = config.block_k // traits.page_rows if traits.page_rows else 1
    columns = sum(d // (32 if d % 64 else 64) for d in (traits.head_dim, traits.head_dim_v))
    assert code.count(r"\bUTMALDG\b") == 2 * boxes * columns
    assert code.count(r"\bSTS\.128\b") == traits.head_dim // 16


def _backward(code: Code, traits: bwd.BackwardTraits, config: bwd.BackwardConfig) -> None:
    """Seven waits: two of the dQ warpgroup's halves, the first S, four a step. Exponentials lie
    under the products of dP^T; a narrow head's products are few, and ptxas puts fewer there."""
    warpgroups = config.num_warpgroups + (2 if config.helpers else 1)
    assert len(code.registers) == 3
    assert max(code.registers) <= at_launch(128 * warpgroups)
    helpers = [bwd.helper_registers(config)] if config.helpers else []
    assert code.moved == sorted([*bwd.registers(config), *helpers])
    dim, dim_v, block_q = traits.head_dim, traits.head_dim_v, config.block_q
    keys = bwd.KEYS // 16 * config.num_warpgroups
    products = 2 * (dim // 16) + dim_v // 16 + 2 * (block_q // 16) + config.dq_parts * keys
    assert code.count(r"\bHGMMA\b") == products
    assert code.count(r"WARPGROUP\.DEPBAR") <= 7
    assert code.count(_VECTOR_ADD) == block_q * dim // 128 // 4
    assert code.count(r"\bMUFU\.EX2\b")
    if min(dim, dim_v) >= 64:
        assert 4 * code.exponentials_under_products() >= code.count(r"\bMUFU\.EX2\b")
    assert code.count(r"\bUTMALDG\b")
    assert bool(code.count(r"\bUTMASTG\b")) != config.quick_end
    # Sixteen bytes a lane: a half of each 16 elements of the 64 rows of dK and of dV.
    if config.quick_end:
        assert code.count(r"\bSTG\.E\.128\b") >= (dim + dim_v) // 16


def _roles(code: Code, traits: bwd.BackwardTraits, config: roles.RolesConfig) -> None:
    """Waits: one a part of dQ; of scores and gradients the first product, two a step and the last.
    A pair's bulk copies: the statistics, and dS to the other block."""
    assert len(code.registers) == 3
    assert max(code.registers) <= roles.LAUNCHED_REGISTERS
    serving, loading, working = roles.registers(config)
    assert code.moved == sorted([serving, loading, working, working])
    dim, dim_v = traits.head_dim, traits.head_dim_v
    parts = dim // roles.dq_columns(traits)
    halves = (1 + (dim > 192)) + (1 + (dim_v > 192))
    products = 2 * (dim + dim_v) // 16 + 4 * halves + 4 * config.num_warpgroups * parts
    assert code.count(r"\bHGMMA\b") == products
    assert code.count(r"WARPGROUP\.DEPBAR") <= parts + 2 * 4
    if config.pair:
        assert code.count(r"\bUTMALDG[^;]*MULTICAST") and code.count(r"\bUCGABAR")
        assert code.count(r"\bUBLKCP\b") == 2


def _matmul(code: Code, config: MatmulConfig) -> None:
    (registers,) = code.registers
    assert registers <= at_launch(config.threads, config.blocks_per_sm)
    moved = [config.producer_registers, config.consumer_registers] if config.reallocates else []
    assert code.moved == moved
    # A chunk of 128 inputs, each 16 of them once for each 64 outputs of a warpgroup.
    assert code.count(r"\bHGMMA\b") == 8 * config.row_mmas
    assert code.count(r"\bUTMALDG\b")


def _trimmed(code: Code, config: TrimmedConfig) -> None:
    """Three warpgroups' loops: whole units, trimmed ones, three quarters' remains."""
    (registers,) = code.registers
    assert registers <= at_launch(384)
    numbers = config.whole.producer_registers, config.whole.consumer_registers
    assert code.moved == [numbers[0]] * 2 + [numbers[1]] * 2
    loops = config.whole, config.trimmed, config.rest
    for tile in loops:
        assert code.count(rf"\bHGMMA\.64x{tile.block_m}x16") == 8 * tile.row_mmas
    # a wait for each set of operands, and one at the end
    waits = sum(2 * tile.row_mmas + 1 for tile in loops)
    assert code.count(r"WARPGROUP\.DEPBAR") == waits
    assert code.count(r"\bUTMALDG\b") and code.count(r"\bUTMASTG\b")


def _by_warps(code: Code, config: DecodeConfig | StreamConfig) -> None:
    """The kernels of few rows multiply on mma.sync, and codes come by bulk copies."""
    (registers,) = code.registers
    streams = isinstance(config, StreamConfig)
    warps = config.num_warps if streams else config.warps + config.reducers
    assert registers <= at_launch(32 * warps, config.blocks_per_sm)
    assert code.moved == [] and not code.count(r"\bHGMMA\b")
    assert code.count(r"\bHMMA\b") and code.count(r"\bUBLKCP\b")


_CHECKS: dict[type, Callable[..., None]] = {
    cached.CachedConfig: _cached,
    cfg.ForwardConfig: _forward,
    bwd.BackwardConfig: _backward,
    roles.RolesConfig: _roles,
    MatmulConfig: _matmul,
    TrimmedConfig: _trimmed,
    DecodeConfig: _by_warps,
    StreamConfig: _by_warps,
}
