"""The run's kernels under the machine's measured roofs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ridgeline.cli.stage import Context, Result, Stage, need
from ridgeline.cli.tables import bytes_text, flops_text, time_text
from ridgeline.core import registry
from ridgeline.core.arch import Arch, detect
from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.probe import times_s
from ridgeline.core.roofline import Cost, floor
from ridgeline.engine.load import open_model
from ridgeline.kernels.attention import flash_attn_func
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.nn.decoder import Decoder
from ridgeline.report.figures import RooflinePoint, roofline
from ridgeline.report.section import Figure, Section, Table

PREFILL_TOKENS = 1024
BUDGET_S = 1.0
OPTIMIZER_BYTES = 40
"""Least bytes a parameter of an fp32 AdamW step: weights read twice and gradients written (12),
gradients, two moments and weights read, moments and weights written (28)."""


def run(context: Context) -> Result:
    """Time the kernels of the run at its shapes; the training step is from its stage."""
    arch = detect(torch.device(context.device))
    plain = open_model(need(context, "weights")["folder"], context.dtype, context.device).model
    points = [
        _attention(plain, context, arch),
        _linears(plain, context, arch, PREFILL_TOKENS, f"linears, {PREFILL_TOKENS} tokens"),
        _linears(plain, context, arch, 1, f"decode linears, {context.dtype}"),
    ]
    del plain
    packed = open_model(need(context, "quantize")["folder"], "bfloat16", context.device).model
    points.append(_linears(packed, context, arch, 1, "decode linears, w4a16"))
    points.append(_training_step(context, arch))
    return {
        "dtype": context.dtype,
        "read_gbps": arch.ceilings.read_gbps,
        "matmul_tflops": arch.ceilings.tflops(context.dtype),
        "source": arch.ceilings.source,
        "points": points,
    }


def _attention(model: Decoder, context: Context, arch: Arch) -> dict[str, Any]:
    config, dtype = model.config, torch_dtype(context.dtype)
    problem = AttentionProblem(
        batch=1,
        seqlen_q=PREFILL_TOKENS,
        seqlen_k=PREFILL_TOKENS,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim,
        dtype=context.dtype,
        causal=True,
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, PREFILL_TOKENS, heads, config.head_dim, generator=generator).to(
            context.device, dtype
        )
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    impl = registry.select(problem, arch).name
    name = f"causal attention, {PREFILL_TOKENS} tokens ({impl})"
    return _timed(
        name, problem.cost(), lambda: flash_attn_func(q, k, v, causal=True), context, arch
    )


def _linears(
    model: Decoder, context: Context, arch: Arch, tokens: int, name: str
) -> dict[str, Any]:
    """Every decoder linear once, layer after layer, so that weights come from main memory."""
    assert model.model.norm is not None
    dtype = model.model.norm.weight.dtype
    width = dtype.itemsize
    calls: list[tuple[torch.nn.Module, torch.Tensor]] = []
    flops = moved = 0.0
    inputs: dict[int, torch.Tensor] = {}
    for block in model.blocks:
        for group in model.linear_groups():
            for path in group:
                linear = block.get_submodule(path)
                n, k = _shape(linear)
                if k not in inputs:
                    inputs[k] = torch.ones(1, tokens, k, dtype=dtype, device=context.device)
                calls.append((linear, inputs[k]))
                flops += 2.0 * tokens * n * k
                moved += _weight_bytes(linear) + width * tokens * (n + k)

    @torch.inference_mode()
    def every_linear() -> None:
        for linear, x in calls:
            linear(x)

    return _timed(name, Cost(flops=flops, bytes=moved), every_linear, context, arch)


def _shape(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear, plain or quantized."""
    return linear.out_features, linear.in_features


def _weight_bytes(linear: Any) -> float:
    if callable(getattr(linear, "weight_bytes", None)):
        return float(linear.weight_bytes())
    return float(sum(p.numel() * p.element_size() for p in linear.parameters()))


def _training_step(context: Context, arch: Arch) -> dict[str, Any]:
    trained = need(context, "train")
    cost = Cost(flops=trained["flops_per_step"], bytes=OPTIMIZER_BYTES * trained["parameters"])
    us = 1e6 * trained["tokens_per_step"] / trained["tokens_per_s"]
    return _point("training step", cost, us, context, arch)


def _timed(
    name: str, cost: Cost, call: Callable[[], object], context: Context, arch: Arch
) -> dict[str, Any]:
    us = 1e6 * statistics.median(times_s(call, context.device, BUDGET_S))
    return _point(name, cost, us, context, arch)


def _point(name: str, cost: Cost, us: float, context: Context, arch: Arch) -> dict[str, Any]:
    least = floor(cost, arch.ceilings, context.dtype)
    return {
        "name": name,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "us": us,
        "floor_us": least.us,
        "bound": least.bound,
        "percent_of_floor": 100 * least.us / us,
    }


def say(result: Result) -> str:
    """Every kernel's share."""
    shares = (f"{p['name']} {p['percent_of_floor']:.0f} %" for p in result["points"])
    return "share of the roofline: " + ", ".join(shares)


def section(result: Result, context: Context) -> Section:
    """The figure and the numbers in it."""
    points = [
        RooflinePoint(name=p["name"], flops=p["flops"], bytes=p["bytes"], us=p["us"])
        for p in result["points"]
    ]
    drawing = roofline(result["read_gbps"], {result["dtype"]: result["matmul_tflops"]}, points)
    rows = tuple(
        (
            str(place),
            p["name"],
            flops_text(p["flops"]),
            bytes_text(p["bytes"]),
            time_text(p["us"]),
            f"{time_text(p['floor_us'])} ({p['bound']})",
            f"{p['percent_of_floor']:.0f} %",
        )
        for place, p in enumerate(result["points"], start=1)
    )
    return Section(
        title="The machine's roofline",
        paragraphs=(
            "A kernel cannot run faster than its floor: the larger of its FLOPs over the measured "
            "matmul rate and its least bytes over the measured read rate. Decoding stands left of "
            "the ridge, where bytes decide: 4-bit weights move a token's work towards it.",
        ),
        figures=(
            Figure(
                svg=drawing,
                caption=f"Measured roofs in {result['dtype']} and the run's kernels; the numbers "
                "are those of the table.",
            ),
        ),
        tables=(
            Table(
                header=(
                    "",
                    "kernel",
                    "work",
                    "least bytes",
                    "median time",
                    "floor",
                    "of the floor",
                ),
                rows=rows,
                caption="Bytes of the training step: weights, gradients and AdamW's state, without "
                "activations.",
            ),
        ),
    )


STAGE = Stage(
    name="roofline",
    order=70,
    title="kernels under the roofline",
    run=run,
    section=section,
    say=say,
    depends=("machine", "weights", "quantize", "train"),
)
