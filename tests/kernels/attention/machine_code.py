"""The machine code of a compiled kernel, and what ptxas may get wrong in it.

Two of its errors gave wrong values on an H200 (docs/log/attention_triton.md): descriptors of shared
memory without their base (descriptors.py), and operands that are overwritten in a loop (here).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*) ?(.*?) ?;", re.M)
_WRITES_NONE = ("ST", "BRA", "BAR", "DEPBAR", "RED", "LDGSTS", "WARP")


class Instruction(NamedTuple):
    """One instruction."""

    address: int
    name: str
    operands: str
    guarded: bool = False
    """Under a predicate."""

    def __str__(self) -> str:
        return f"{self.address:#x} {self.name} {self.operands}"


def _cuobjdump(flag: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [NVIDIA / "cuobjdump", flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", cubin))
    assert found is not None
    return int(found[1]), int(found[2])


def disassembly(cubin: bytes) -> list[Instruction]:
    """All of a kernel. Triton's own `asm["sass"]` ends without a word after 64 KB: of dK, dV and dQ
    in one launch that leaves out most of dQ."""
    return instructions(_cuobjdump("-sass", cubin))


def instructions(sass: str) -> list[Instruction]:
    """The instructions of cuobjdump's text."""
    lines = _LINE.findall(sass)
    return [Instruction(int(at, 16), name, ops, bool(guard)) for at, guard, name, ops in lines]


def _written(one: Instruction) -> set[int]:
    """The registers that an instruction writes."""
    target = re.match(r"R(\d+)\b", one.operands)
    if target is None or one.name.startswith(_WRITES_NONE):
        return set()
    count = 1
    if wgmma := re.match(r"HGMMA\.64x(\d+)x", one.name):
        count = int(wgmma[1]) // 2
    elif ".128" in one.name or ".M88.4" in one.name:
        count = 4
    elif ".64" in one.name or ".WIDE" in one.name:
        count = 2
    return set(range(int(target[1]), int(target[1]) + count))


def _next(code: list[Instruction]) -> list[list[int]]:
    """For each instruction, those that may come after it."""
    place = {one.address: index for index, one in enumerate(code)}
    found = []
    for index, one in enumerate(code):
        after = [index + 1] if index + 1 < len(code) else []
        if one.name == "EXIT" and not one.guarded:
            after = []
        target = re.search(r"0x([0-9a-f]+)", one.operands) if one.name == "BRA" else None
        if target is not None:
            always = not one.guarded and not re.match(r"!?U?P", one.operands)
            after = [place[int(target[1], 16)], *([] if always else after)]
        found.append(after)
    return found


def _reached(start: int, edges: list[list[int]]) -> set[int]:
    """What can be reached by one edge or more."""
    found: set[int] = set()
    left = list(edges[start])
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            left += edges[at]
    return found


def overwritten_operands(code: list[Instruction]) -> list[str]:
    """Products in a loop whose first operand comes from before the loop, in registers that the loop
    writes too: from the second round on the product reads something else.

    (No kernel here carries an operand of a product over to the next round on purpose.)
    """
    after = _next(code)
    before: list[list[int]] = [[] for _ in code]
    for at, ends in enumerate(after):
        for end in ends:
            before[end].append(at)
    writes = [_written(one) for one in code]
    bad = []
    for at, one in enumerate(code):
        operand = re.match(r"R\d+, R(\d+), gdesc", one.operands)
        if operand is None or not one.name.startswith("HGMMA"):
            continue
        again = _reached(at, after)
        registers = range(int(operand[1]), int(operand[1]) + 4)
        if at in again and any(_from_both(at, r, code, writes, before, again) for r in registers):
            bad.append(str(one))
    return bad


def _from_both(
    at: int,
    register: int,
    code: list[Instruction],
    writes: list[set[int]],
    before: list[list[int]],
    again: set[int],
) -> bool:
    """Whether a register's value may be from before a loop (what is not in `again`) or from it."""
    seen: set[int] = set()
    sources: set[bool] = set()
    left = list(before[at])
    while left:
        here = left.pop()
        if here in seen:
            continue
        seen.add(here)
        if register in writes[here]:
            sources.add(here in again)
            if not code[here].guarded:
                continue
        left += before[here]
    return len(sources) == 2
