"""What inductor pairs of a block's collectives and products, without a GPU: its pass is asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ridgeline.parallel.layout import Layout
from ridgeline.parallel.overlap import fold_reshapes, pair_with_products
from ridgeline.parallel.verify import random_batch
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import SEQLEN, TINY, build


def _fused(rank: int, layout: Layout) -> dict[str, int]:
    """Communication in a block's forward graph after the pass."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    config.fx_graph_cache = False
    dist.is_nccl_available = lambda: True  # the pass asks
    real, found = post_grad.micro_pipeline_tp_pass, Counter()

    def seen(graph: torch.fx.Graph) -> None:
        real(graph)
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        found.update(name for name in names if "symm_mem" in name or "_tensor" in name)
        raise KeyboardInterrupt  # what follows would need the GPU's operators

    post_grad.micro_pipeline_tp_pass = seen
    model = build(layout, replace(TINY, hidden_size=64), samples=1)
    group = model.world.group("tp")
    assert group is not None
    pair_with_products(group.group_name)
    model.init_weights(0)
    batch = random_batch([0], SEQLEN, TINY.vocab_size, 0)
    with pytest.raises(KeyboardInterrupt):
        model.forward_backward([batch], batch.num_valid)
    return dict(found)


@pytest.mark.dist
def test_every_gather_and_scatter_of_a_forward_pass_is_paired():
    layout = Layout(tp=2, sequence_parallel=True, compile_blocks=True)
    for found in run_ranks(2, _fused, layout, timeout_s=300):
        assert found == {
            "symm_mem.fused_all_gather_matmul.default": 2,
            "symm_mem.fused_matmul_reduce_scatter.default": 2,
        }


def test_a_reshape_of_a_reshape_reads_what_the_first_one_read():
    graph = torch.fx.Graph()
    x, value = graph.placeholder("x"), torch.randn(6, 4)
    x.meta["val"] = value
    reshape = torch.ops.aten.reshape.default
    shapes = [[2, 3, 4], [6, 4], [24], [4, 6]]
    nodes = [x]
    for shape in shapes:
        nodes.append(graph.call_function(reshape, (nodes[-1], shape)))
        nodes[-1].meta["val"] = value.reshape(shape)
    once = graph.call_function(torch.ops.aten.neg.default, (nodes[2],))
    graph.output((once, nodes[4]))
    fold_reshapes(graph)
    assert once.args == (x,) and nodes[4].args == (x, [4, 6])
    assert [node.target for node in graph.nodes].count(reshape) == 1
    negative, last = torch.fx.GraphModule({}, graph)(value)
    assert torch.equal(negative, -value) and torch.equal(last, value.reshape(4, 6))
