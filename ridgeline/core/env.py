"""The only reader of os.environ.

RIDGELINE_CACHE        folder for converted weights, measured ceilings, tuned tiles
                       (default: $XDG_CACHE_HOME/ridgeline, else ~/.cache/ridgeline)
RIDGELINE_WHEELS       a folder with wheels fetched by hand (core/assets.py looks there first)
RIDGELINE_IMPL_<OP>    an implementation's name for an op, e.g. RIDGELINE_IMPL_ATTENTION=ref;
                       an explicit `impl=` argument beats it, it beats the heuristic
RIDGELINE_DEBUG        1: kernels check the values of index tensors (page ids, lengths) on the GPU,
                       where the host does not look at them, and trap on a wrong one
RIDGELINE_UNVERIFIED   1: take Hopper kernels that no GPU run has confirmed yet
                       (kernels/attention/cute_sm90_verified.py)
RIDGELINE_API_KEY      the key that `ridgeline serve` asks for and `ridgeline bench serve` sends
RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID   set by torchrun
TORCH_FR_BUFFER_SIZE, KINETO_LOG_LEVEL, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   PyTorch's own and
                       its libraries', set where they are not (record_collectives, quiet_profiler,
                       stay_on_loopback)
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """The user cache folder (not created here)."""
    if own := os.environ.get("RIDGELINE_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "ridgeline"
    return Path.home() / ".cache" / "ridgeline"


def wheels_dir() -> Path | None:
    """A folder with wheels that the user fetched, or None."""
    own = os.environ.get("RIDGELINE_WHEELS")
    return Path(own).expanduser() if own else None


def api_key() -> str | None:
    """The server's key, or None; a flag would show it to everyone who can list processes."""
    return os.environ.get("RIDGELINE_API_KEY") or None


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process, with changes."""
    return {**os.environ, **changes}


def impl_override(op: str) -> str | None:
    """The implementation that the environment asks for, or None."""
    return os.environ.get(f"RIDGELINE_IMPL_{op.upper()}") or None


@functools.cache
def _switch_names(op: str) -> tuple[Any, ...]:
    names = (f"RIDGELINE_IMPL_{op.upper()}", "RIDGELINE_UNVERIFIED")
    return tuple(os.environ.encodekey(name) for name in names)


def switches(op: str) -> tuple[Any, Any]:
    """What of the environment decides which implementation serves an op, as it is stored: for keys
    of caches. Reading a variable that is not set takes os.environ a microsecond or two, and this a
    tenth of it."""
    impl, untried = _switch_names(op)
    stored = vars(os.environ)["_data"]
    return stored.get(impl), stored.get(untried)


def unverified() -> bool:
    """Whether kernels that have not run on hardware yet may be taken."""
    return os.environ.get("RIDGELINE_UNVERIFIED", "0") not in ("", "0", "false")


def rank() -> int:
    """Global rank under torchrun; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank on this node under torchrun; 0 for a single process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes under torchrun; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_torchrun() -> bool:
    """Whether torchrun watches this process: when one ends badly, it ends the others."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def local_world_size() -> int:
    """Number of processes on this node under torchrun; 1 for a single process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def join_ranks(rank: int, size: int, port: int) -> None:
    """Make this process a rank of a run on this machine, as torchrun would."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def stay_on_loopback() -> None:
    """Let processes of one machine talk over its loopback interface alone; to be called before
    their process group is made."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def record_collectives(count: int = 512) -> None:
    """Let PyTorch remember the last collectives of this process, for a report of a hang; to be
    called before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(count))


def quiet_profiler() -> None:
    """Keep PyTorch's profiler from writing its own log lines to stderr; to be called before its
    first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")


def triton_interpreted() -> bool:
    """True where Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false")


def kernel_debug() -> bool:
    """True where kernels check the values of index tensors on the device (RIDGELINE_DEBUG=1)."""
    return os.environ.get("RIDGELINE_DEBUG", "0") not in ("", "0", "false")
