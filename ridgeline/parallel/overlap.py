"""Asynchronous tensor parallel: inductor cuts a product and sends its pieces while it runs.

    gather, then products  ->  one operator over symmetric memory      forward and backward
    product, then scatter  ->  the same                                forward

Inductor's pass of PyTorch 2.11 to 2.14 finds a pair only where two things hold that nothing says:
the group was announced by `enable_symm_mem_for_group` (whose own deprecation warns that there is no
need: the pass still asks for it and leaves out every other group without a word), and no reshape of
a reshape stands between a gather and its product. In a block's backward pass the scattered gradient
is a sum of products, which no pattern takes.
Source: torch/_inductor/fx_passes/micro_pipeline_tp.py (PyTorch 2.11, 2.13), read.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.core.errors import unsupported

_RESHAPE = torch.ops.aten.reshape.default


def overlap_tensor_parallel(device: torch.device, group: dist.ProcessGroup) -> None:
    """Let inductor pair the blocks' collectives of a group with their matmuls.

    Raises: NotImplementedError where there is no GPU.
    """
    if device.type != "cuda":
        raise unsupported(
            "layout",
            "async_tp",
            "run on GPUs",
            device.type,
            "leave it out: the result is the same",
        )
    pair_with_products(group.group_name)


def pair_with_products(group_name: Any) -> None:
    """Switch inductor's pass on for a group."""
    # Seconds of imports.
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.distributed import _symmetric_memory

    class Folded(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            fold_reshapes(graph)

        def uuid(self) -> Any:
            return "ridgeline reshapes of reshapes 1"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group_name)
    config._micro_pipeline_tp = True
    config.post_grad_custom_pre_pass = Folded()


def fold_reshapes(graph: torch.fx.Graph) -> None:
    """Let each reshape of a reshape read what the first one read."""
    for node in graph.nodes:
        if node.target is not _RESHAPE or node.args[0].target is not _RESHAPE:
            continue
        source = node.args[0].args[0]
        node.update_arg(0, source)
        if _layout(source) == _layout(node) is not None:
            node.replace_all_uses_with(source)
    for node in reversed(graph.nodes):
        if node.target is _RESHAPE and not node.users:
            graph.erase_node(node)


def _layout(node: torch.fx.Node) -> tuple[list[Any], list[Any]] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return list(value.shape), list(value.stride())
