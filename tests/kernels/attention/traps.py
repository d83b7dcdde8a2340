"""Run by test_traps.py in a process of its own: index tensors that lie, in debug mode.

    TRITON_INTERPRET=1 RIDGELINE_DEBUG=1 python -m tests.kernels.attention.traps

Prints a JSON line {"test", "error"} for each call; the interpreter raises where a GPU would trap.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from functools import partial

import torch
import triton.runtime.interpreter as interpreter

from ridgeline.kernels.attention import config, kvcache, triton_append
from ridgeline.kernels.attention import triton as kernels

from . import cases


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


LIES = {
    "block_table": ("paged", dict(block_table=ints(0, 99, 2, 3, 4, 5).view(2, 3))),
    "block_table-negative": ("paged", dict(block_table=ints(0, -1, 2, 3, 4, 5).view(2, 3))),
    "cache_seqlens": ("paged", dict(seqused_k=ints(40, 400))),
    "cu_seqlens_q": ("varlen", dict(cu_seqlens_q=ints(0, 30, 20))),
    "cu_seqlens_k": ("varlen", dict(cu_seqlens_k=ints(0, 20, 900))),
    "cu_seqlens_k-paged": ("varlen_paged", dict(cu_seqlens_k=ints(0, -1, 40))),
    "max_seqlen_q": ("varlen", dict(max_seqlen_q=3)),
    "seqused_q": ("seqused", dict(seqused_q=ints(-1, 4))),
    "seqused_k": ("seqused", dict(seqused_k=ints(4, 41))),
    "cache_batch_idx": ("batch_idx", dict(kv_batch_idx=ints(0, 5))),
    "leftpad_k": ("leftpad", dict(leftpad_k=ints(0, 90))),
}


def run(layout: str, lie: dict) -> None:
    kind = dict(seqlen_q=20, seqlen_k=40, heads=2, kv_heads=1, dim=16, dim_v=16, batch=2)
    a = cases.build(cases.Case(name="", layout=layout, causal=True, **kind)).arguments
    a = replace(a, **lie)
    kernels.forward(a.q, a.k, a.v, a.options(), a.extras())


APPEND_LIES = {
    "cache_seqlens": dict(cache_seqlens=ints(3, 31)),
    "block_table": dict(block_table=ints(0, 1, 2, 9).view(2, 2)),
    "cache_batch_idx": dict(block_table=None, kv_batch_idx=ints(0, 4), cache_seqlens=ints(3, 5)),
    "rotary_cos": dict(rotary_cos=torch.ones(17, 8), rotary_sin=torch.zeros(17, 8)),
}


def append(lie: dict) -> None:
    """Two new tokens of two sequences, of two pages each."""
    tables = dict(rotary_cos=torch.ones(40, 8), rotary_sin=torch.zeros(40, 8))
    kind = dict(kv_batch_idx=None, block_table=ints(0, 1, 2, 3).view(2, 2), **tables)
    given = {"cache_seqlens": ints(3, 17), **kind, "rotary_interleaved": False, **lie}
    cache, new = torch.zeros(4, 16, 1, 16), torch.ones(2, 2, 1, 16)
    triton_append.append_kv(cache, cache.clone(), new, new, kvcache.Where(**given))
    triton_append.rotate_queries(new, kvcache.Where(**given), True)


def report(name: str, call) -> None:
    try:
        call()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"test": name, "error": error}), flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    for takes_decode in (lambda problem: False, config.takes_decode):
        kernels.takes_decode = takes_decode
        path = "decode" if takes_decode is config.takes_decode else "tiles"
        for name, (layout, lie) in LIES.items():
            report(f"{path} {name} true", partial(run, layout, {}))
            report(f"{path} {name} lie", partial(run, layout, lie))
    for name, lie in APPEND_LIES.items():
        report(f"append {name} true", partial(append, {}))
        report(f"append {name} lie", partial(append, lie))


if __name__ == "__main__":
    sys.exit(main())
