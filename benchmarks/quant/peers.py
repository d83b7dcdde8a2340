"""Other quantization libraries, each in an environment of its own, on our tokens.

An environment is a venv under the cache, made at the first use and kept: the library's pinned
packages go into it, and what it can share with the caller (PyTorch above all) is found through a
path file, behind its own packages. Each library runs as a child process (peer_llmcompressor.py,
peer_gptqmodel.py, which import nothing of ours), writes a checkpoint, and is scored by whoever
called, through our readers: so its files are read here too.
Settings are the libraries' defaults but for what the protocol fixes (bits, group size, symmetry,
tokens). Traps that the two scripts work around: GPTQModel wants two CPU workers named; llm-
compressor's AWQ pins memory, which a machine without an accelerator refuses.
"""

from __future__ import annotations

import json
import site
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ridgeline.core import env, progress

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One library at one version."""

    name: str
    version: str
    pins: tuple[str, ...]
    """What pip is asked for."""
    script: str
    runs: tuple[tuple[str, bool, str], ...]
    """(method, symmetric, the variant as the script knows it) of a benchmark."""

    @property
    def impl(self) -> str:
        """As results name it."""
        return f"{self.name} {self.version}"


PEERS = (
    Peer(
        name="llm-compressor",
        version="0.14.0.1",
        pins=("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0"),
        script="peer_llmcompressor.py",
        runs=(("gptq", True, "gptq"), ("gptq", False, "gptq"), ("awq", False, "awq")),
    ),
    Peer(
        name="gptqmodel",
        version="7.6.0",
        pins=("gptqmodel==7.6.0", "transformers==5.24.0", "numpy==2.2.6"),
        script="peer_gptqmodel.py",
        runs=(("gptq", True, "group-aware"), ("gptq", True, "desc_act")),
    ),
)


def environment(peer: Peer) -> Path:
    """The Python of a library's environment, made where it is not there yet."""
    folder = env.cache_dir() / "peers" / f"{peer.name}-{peer.version}"
    python, done = folder / "bin" / "python", folder / "complete"
    if done.is_file():
        return python
    progress.say(f"peers: installing {' '.join(peer.pins)} into {folder}")
    venv.create(folder, with_pip=True, clear=True)
    theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (theirs / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = [str(python), "-m", "pip", "install", "--no-input", "--quiet", *peer.pins]
    subprocess.run([*install, f"torch=={torch.__version__}"], check=True)
    done.write_text("\n".join(peer.pins) + "\n")
    return python


def quantize_with(
    peer: Peer, variant: str, *, model: Path, token_ids: torch.Tensor, out: Path, **layout: Any
) -> dict[str, Any]:
    """Run a library; the checkpoint is in `out`. Returns what its script said: seconds (load and
    quantization, not the save), peak_memory_gib, versions.

    layout: bits, group_size, symmetric.
    """
    tokens = out.parent / f"{out.name}.tokens.safetensors"
    save_file({"input_ids": token_ids.cpu().contiguous()}, tokens)
    asked = {
        "model": str(model),
        "tokens": str(tokens),
        "out": str(out),
        "variant": variant,
        "threads": torch.get_num_threads(),
        **layout,
    }
    start = time.perf_counter()
    done = subprocess.run(
        [str(environment(peer)), str(HERE / peer.script), json.dumps(asked)],
        stdout=subprocess.PIPE, text=True, cwd=out.parent,
        env=env.child_environment(
            PYTHONPATH="", OMP_NUM_THREADS=str(torch.get_num_threads()), HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false", GPTQMODEL_CPU_WORKERS="2",
        ),
    )  # fmt: skip
    tokens.unlink()
    if done.returncode:
        raise SystemExit(f"peers: {peer.impl} {variant} failed with exit code {done.returncode}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return said | {"whole_seconds": round(time.perf_counter() - start, 1), "python": sys.version}
