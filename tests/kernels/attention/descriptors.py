"""Where the shared-memory descriptors of wgmma come from, read in the machine code of a kernel.

ptxas 12.8 (in Triton 3.6) loses the base of a descriptor where two products read the same shared
memory in two swizzle modes: it adds the offset to whatever register was at hand. The product then
reads other tiles, or memory that is not there (docs/log/attention_triton.md).
"""

from __future__ import annotations

import re
from collections import defaultdict

from .machine_code import Instruction

_UNIFORM = re.compile(r"\bUR(\d+)\b")
_HGMMA = re.compile(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]")
_KEPT = ("UIADD3", "UIADD3.64", "UMOV", "USGXT.U32", "USHF.R.U32.HI", "ULOP3.LUT", "ULEA", "USEL")
"""What makes a descriptor's low word of another uniform register."""


def shared_by_modes(ptx: str) -> dict[str, set[int]]:
    """{place in shared memory: high words of descriptors on it} where there are several."""
    value = dict(re.findall(r"^\s*(?:mov|cvt)\.\w+(?:\.u32)?\s+(%\w+), (%?\w+);", ptx, re.M))
    base = dict(re.findall(r"bfe\.u32\s+(%\w+), (%\w+), 4, 14;", ptx))
    offset = {
        name: (source, int(by))
        for name, source, by in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)
    }

    def place(name: str) -> str:
        by = 0
        while name in value or name in offset:
            name, more = (value[name], 0) if name in value else offset[name]
            by += more
        return f"{name}+{by}"

    used = set(re.findall(r"%rd\d+", " ".join(re.findall(r"wgmma\.mma_async[^;]*;", ptx))))
    found = defaultdict(set)
    pattern = r"(?:or\.b64|add\.s64)\s+(%rd\d+), (%rd\d+), (-?\d+);"
    for name, source, constant in re.findall(pattern, ptx):
        word = value.get(source, source)
        if name in used and word in base:
            found[place(base[word])].add((int(constant) >> 32) & 0xFFFFFFFF)
    return {where: modes for where, modes in found.items() if len(modes) > 1}


def lost_bases(code: list[Instruction]) -> list[str]:
    """Products that read a descriptor whose low word does not lead back to the base of shared
    memory, by the last write before each use in program order."""
    writes = defaultdict(list)
    for at, (_, name, operands, _) in enumerate(code):
        target = re.match(r"UR(\d+)\b", operands)
        if target and name != "HGMMA":
            first = int(target[1])
            wide = name.endswith(".64") or ".WIDE" in name
            for register in (first, first + 1) if wide else (first,):
                writes[register].append((at, name, operands))

    def leads_home(register: int, before: int, depth: int = 0) -> bool:
        earlier = [write for write in writes[register] if write[0] < before]
        if not earlier or depth > 40:
            return False
        at, name, operands = earlier[-1]
        if name == "R2UR":  # made by the threads: not looked into
            return True
        if name == "UMOV" and "0x400" in operands:
            return True
        if not name.startswith(tuple(_KEPT)):
            return False
        sources = [int(n) for n in _UNIFORM.findall(operands)[1:]]
        return any(leads_home(source, at, depth + 1) for source in sources)

    bad = []
    for at, (_, name, operands, _) in enumerate(code):
        found = _HGMMA.match(f"{name} {operands}")
        if found is None:
            continue
        first = int(found[2])
        lows = (first + 2,) if found[1] else (first, first + 2)
        if not all(leads_home(low, at) for low in lows):
            bad.append(f"{name} {operands}".strip())
    return bad
