"""A process that takes itself for one on an H200 and notes which kernels it asks for.

    python -O -m tests.pretended_hopper KEYS.json WHAT...

WHAT: GPU tests (files or ids), groups of benchmarks/kernels/attention/verify_hopper.py, or `bench`,
the cells of bench_attention_hopper.py (`bench:REGEX`: those whose label matches). Everything runs
as on the GPU, through the same choices of tiles, but tensors for the GPU lie on the CPU, kernels
are noted instead of compiled or launched, and what they would have computed is anything: so Python
has to leave out assertions (-O), or a test would end before it has asked for its last kernel. The
file lists the kernels in the order in which they were asked for, and every test or cell that ended
early: then the list may be short. Needs apache-tvm-ffi and the DSL's package (which is not
imported), no GPU. tests/export_kernels.py compiles such lists.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ridgeline.core import arch as arches

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks" / "kernels" / "attention"
H200 = arches.KNOWN["sm90"]


class OnCpu(TorchFunctionMode):
    """Tensors asked for on the GPU are made on the CPU; random and filled ones are zeros, which
    cost no time."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        on_gpu = _is_cuda(kwargs.get("device"))
        if on_gpu:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(x) else x for x in args)
        elif on_gpu and func in (torch.randn, torch.rand):
            func = torch.zeros
        elif func is torch.randn_like:
            func = torch.zeros_like
        elif on_gpu and func is torch.full and isinstance(args[1], float):
            func, args = torch.zeros, args[:1]
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class Nothing:
    """A stream, an event, a graph, or a context of one: takes every call."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return nothing

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def nothing(*_: object, **__: object) -> None:
    pass


class Notes:
    """What was asked for, each once, and what ended early."""

    def __init__(self) -> None:
        self.kernels: dict[str, None] = {}
        self.early: list[str] = []

    def attention(self, traits: Any, config: Any) -> Callable[..., None]:
        self._note("attention", traits, config)
        return nothing

    def w4a16(self, config: Any) -> Callable[..., None]:
        self._note("w4a16", config)
        return nothing

    def _note(self, op: str, *records: Any) -> None:
        named = [[type(record).__name__, asdict(record)] for record in records]
        self.kernels[json.dumps([op, *named], sort_keys=True)] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            self.early.append(f"{report.nodeid}: {said[-1] if said else 'failed'}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.early.append(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1]}")


def pretend(notes: Notes) -> None:
    """Turn this process into one on an H200, for good. Before anything else of ridgeline.kernels is
    imported."""
    os.environ["RIDGELINE_UNVERIFIED"] = "1"
    arches.detect = lambda device="cpu": H200
    _pretend_torch()
    _pretend_triton()
    from ridgeline.kernels.attention import cute_sm90, ref
    from ridgeline.kernels.attention.cute import library
    from ridgeline.kernels.w4a16 import cute_library

    library.kernel = notes.attention
    cute_library.kernel = notes.w4a16
    torch._C._cuda_getDevice = lambda: 0
    cute_sm90._stream = lambda device: 0
    ref.attention_ref = _no_reference
    ref.gradients = lambda made, leaves, *_: {n: torch.zeros_like(x) for n, x in leaves.items()}


def _pretend_torch() -> None:
    facts = types.SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=H200.num_units,
        total_memory=H200.memory_bytes, L2_cache_size=H200.l2_bytes,
    )  # fmt: skip
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": facts.name,
        "get_device_properties": facts,
        "is_current_stream_capturing": False,
        "current_stream": Nothing(),
        "mem_get_info": (H200.memory_bytes, H200.memory_bytes),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.backends.cudnn.version = lambda: 91900
    for name in ("synchronize", "empty_cache", "manual_seed_all", "set_device"):
        setattr(torch.cuda, name, nothing)
    for name in ("Stream", "Event", "CUDAGraph", "stream", "graph", "device"):
        setattr(torch.cuda, name, Nothing)


def _pretend_triton() -> None:
    """Triton's kernels do nothing either."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import autotuner, jit

    jit.JITFunction.run = nothing
    autotuner.Autotuner.run = nothing


def _no_reference(q: Any, k: Any, v: Any, options: Any, extras: Any, dtype: Any = None) -> Any:
    """Zeros like (out, lse): nobody compares with them."""
    lse_shape = (q.shape[-2], q.shape[0]) if q.ndim == 3 else (*q.shape[0:3:2], q.shape[1])
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype or q.dtype)
    return out, torch.zeros(lse_shape)


def run_tests(paths: Sequence[str], notes: Notes) -> None:
    """GPU tests by pytest, in this process."""
    plain = ["-o", "addopts=", "--assert=plain", "-p", "no:warnings", "-p", "no:cacheprovider"]
    with OnCpu():
        pytest.main([*plain, "-q", "-m", "gpu", "--tb=line", *paths], plugins=[notes])


def run_group(name: str, notes: Notes) -> None:
    """A group of verify_hopper.py, repeats left out."""
    verify = importlib.import_module("verify_hopper")
    verify.bitwise = lambda what, qkv, options, _count, once=verify.bitwise: once(
        what, qkv, options, 1
    )
    verify.bench.measure = lambda runs, *_, **__: {n: [run(), 1.0][1:] for n, run in runs.items()}
    every = verify.bench.calls
    verify.bench.calls = lambda cell, peers: {"cute_sm90": every(cell, peers)["cute_sm90"]}
    verify.say = verify.cached.say = nothing
    found = {n.removeprefix("group_"): f for n, f in vars(verify).items() if "group_" in n}
    found |= verify.cached.groups(nothing) | verify.tail.groups(nothing)
    _run(f"group {name}", found[name], notes)


def run_cells(pattern: str, notes: Notes) -> None:
    """Cells of bench_attention_hopper.py, with what checks them."""
    bench = importlib.import_module("bench_attention_hopper")
    for cell in bench.cells():
        if not re.search(pattern, cell.label()):
            continue
        if cell.lengths is None:
            _run(cell.label(), lambda c=cell: bench.error_ratio(c, *bench.inputs(c)[:3]), notes)
        _run(cell.label(), lambda c=cell: bench.calls(c, bench.Peers())["cute_sm90"](), notes)


def _run(what: str, call: Callable[[], object], notes: Notes) -> None:
    try:
        with OnCpu():
            call()
    except ZeroDivisionError:
        pass  # a ratio of errors, which are 0 here
    except Exception as error:  # noqa: BLE001  told in the report
        notes.early.append(f"{what}: {type(error).__name__}: {error}")


def main(words: Sequence[str]) -> None:
    """Write what WHAT asks for as JSON."""
    if __debug__:
        raise SystemExit("pretended_hopper: run it as python -O -m tests.pretended_hopper")
    target, *wanted = words
    sys.path.insert(0, str(BENCHMARKS))
    notes = Notes()
    pretend(notes)
    tests = [what for what in wanted if ".py" in what]
    for what in wanted:
        if what.partition(":")[0] == "bench":
            run_cells(what.partition(":")[2], notes)
        elif what not in tests:
            run_group(what, notes)
    if tests:
        run_tests(tests, notes)
    found = {"kernels": [json.loads(text) for text in notes.kernels], "early": notes.early}
    Path(target).write_text(json.dumps(found, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
