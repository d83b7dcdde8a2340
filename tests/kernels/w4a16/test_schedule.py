"""Uneven shares of the Hopper WGMMA kernel, every block's walk followed without a GPU."""

import pytest

from ridgeline.kernels.w4a16 import config as configs
from ridgeline.kernels.w4a16.schedule import head_steps, start_of

CASES = [(left, 132, 32, waves) for left in (1, 20, 92, 112, 131) for waves in (0, 1)]
CASES += [(224, 132, 64, 0), (184, 132, 32, 2), (112, 132, 2, 0), (5, 7, 16, 0), (1, 3, 16, 1)]
CASES += [(80, 66, 64, 0), (64, 128, 224, 0)]


def walk(block, left, blocks, steps, waves, head):
    """(tile, first step, end step) of a block in the kernel's order: tiles of the waves are
    negative."""
    at = start_of(block, left, blocks, steps, head)
    end = start_of(block + 1, left, blocks, steps, head)
    pieces = waves + ((end - 1) // steps - at // steps + 1 if end > at else 0)
    lead = int(at % steps != 0)
    for index in range(pieces):
        if 0 <= index - lead < waves:
            yield -1 - (index - lead) * blocks - block, 0, steps
        else:
            first = at % steps
            after = min(steps, first + end - at)
            yield at // steps, first, after
            at += after - first
    assert at == end


@pytest.mark.parametrize(("left", "blocks", "steps", "waves"), CASES)
def test_shares_cover_once_and_nobody_waits_early(left, blocks, steps, waves):
    head = head_steps(waves, left, blocks, steps)
    if left * (steps - head) < blocks:
        pytest.skip("a block without work: no plan has it")
    done = {}
    for block in range(blocks):
        order = list(walk(block, left, blocks, steps, waves, head))
        for place, (tile, first, end) in enumerate(order):
            done.setdefault(tile, []).append((first, end, block))
            # what a block leaves it computes first, what it finishes with others last
            assert first == 0 or place == 0
            assert end == steps or place in (0, len(order) - 1)
            assert not (first == 0 and end < steps) or place == len(order) - 1
    assert len(done) == left + waves * blocks
    for tile, parts in done.items():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] == steps
        assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
        # the finisher finds the others' sums in the places of the blocks after it
        assert [part[2] for part in parts] == list(range(parts[0][2], parts[0][2] + len(parts)))
        assert tile >= 0 or len(parts) == 1


def test_who_finishes_has_the_head_more():
    """112 tiles of 32 steps on 132 blocks: 27.2 a block; 20 have nothing to finish."""
    lengths = {True: [], False: []}
    for block in range(132):
        order = list(walk(block, 112, 132, 32, 0, head_steps(0, 112, 132, 32)))
        finishes = order[-1][1] == 0
        lengths[finishes].append(sum(end - first for _, first, end in order))
    assert len(lengths[False]) == 20 and set(lengths[False]) == {24, 25}
    assert set(lengths[True]) == {27, 28}


def test_model_plans_give_every_block_a_step():
    kind = configs.Traits(kind="bf16", scale="bf16", symmetric=True, packed_group=128)
    for m, n, k in ((100, 128, 2048), (40, 1544, 4096), (130, 520, 1152), (257, 10240, 8192)):
        launch = configs.matmul_launch(kind, m, n, k, 132)
        config = launch.config
        left = -(-m // config.block_m) * -(-n // config.block_n) - launch.waves * launch.blocks
        if left and config.split == 1:
            steps = k // 128
            starts = [start_of(b, left, launch.blocks, steps, launch.head) for b in range(999)]
            assert all(b > a for a, b in zip(starts, starts[1 : launch.blocks + 1], strict=False))
