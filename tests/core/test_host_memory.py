"""What is freed stays with the process, until it is given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
from ridgeline.core.host_memory import give_back_freed_memory, keep_freed_memory

def held():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024

print(keep_freed_memory())
before = held()
many = [bytes(40_000) for _ in range(4_000)]
del many
kept = held()
give_back_freed_memory()
print(kept - before, held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc")
def test_freed_memory_is_kept_and_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    known, sizes = done.stdout.splitlines()
    if known == "False":
        pytest.skip("no glibc")
    kept, left = map(int, sizes.split())
    assert kept > 140 and left < 20
