from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.parallel.collectives import Group
from ridgeline.parallel.loss import IGNORE, VocabPart, chunk_tokens, linear_cross_entropy
from tests.parallel.harness import run_ranks


def problem(tokens, vocab=37, width=12, dtype=torch.float64):
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::3] = IGNORE
    return x, weight, targets


def plain(x, weight, targets):
    return F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17, 101])
@pytest.mark.parametrize("chunk", [1, 16, 1000])
def test_equals_the_full_loss_with_gradients(tokens, chunk):
    x, weight, targets = problem(tokens)
    loss, count = linear_cross_entropy(x, weight, targets, chunk=chunk)
    expected = plain(x, weight, targets)
    assert count.item() == int((targets != IGNORE).sum())
    assert loss.dtype == torch.float64 and abs(loss.item() - expected.item()) < 1e-10
    found = torch.autograd.grad(3.5 * loss, (x, weight))
    wanted = torch.autograd.grad(3.5 * expected, (x, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    x, weight, targets = problem(5, vocab=4, width=3)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, chunk=2)[0], (x, weight)
    )


def test_nothing_counts():
    x, weight, targets = problem(6)
    loss, count = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE), chunk=4)
    assert loss.item() == 0.0 and count.item() == 0
    gradient = torch.autograd.grad(loss, (x, weight))
    assert gradient[0].abs().max() == 0.0 and gradient[1].abs().max() == 0.0


def test_large_logits_stay_finite():
    x, weight, targets = problem(9, dtype=torch.float32)
    loss, _ = linear_cross_entropy(1000.0 * x, weight, targets)
    wanted = plain(1000.0 * x.double(), weight.double(), targets)
    assert torch.isfinite(loss) and abs(loss.item() / wanted.item() - 1.0) < 1e-6


def test_bf16_is_as_good_as_the_plain_form():
    x, weight, targets = problem(64, vocab=300, width=32, dtype=torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    reference = torch.autograd.grad(plain(*wide, targets), wide)
    loss, _ = linear_cross_entropy(x, weight, targets, chunk=10)
    ours = torch.autograd.grad(loss, (x, weight))
    same_dtype = torch.autograd.grad(plain(x, weight, targets), (x, weight))
    for got, peer, exact in zip(ours, same_dtype, reference, strict=True):
        assert got.dtype == torch.bfloat16
        error, bound = (got - exact).abs().max(), (peer - exact).abs().max()
        assert error <= 2 * bound + 1e-3


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns, and what was reduced."""

    def __init__(self):
        super().__init__()
        self.numel = 0
        self.reduced = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "all_reduce":
            self.reduced[tuple(args[0].shape), args[1]] += 1
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_all_logits_never_exist():
    x, weight, targets = problem(400, vocab=200, width=8, dtype=torch.float32)
    with Largest() as ours:
        linear_cross_entropy(x, weight, targets, chunk=20)[0].backward()
    with Largest() as full:
        plain(x, weight, targets).backward()
    assert ours.numel == 20 * 200 and full.numel == 400 * 200


def _over_two_ranks(rank):
    torch.manual_seed(0)
    x, weight, targets = problem(400, vocab=201, width=8, dtype=torch.float32)
    rows = slice(0, 101) if rank == 0 else slice(101, 201)  # the vocabulary does not divide
    own = weight[rows].detach().requires_grad_()
    group = dist.group.WORLD
    part = VocabPart(group=Group.of(group), start=rows.start)
    with Largest() as seen:
        loss, _ = linear_cross_entropy(x, own, targets, chunk=20, part=part)
        loss.backward()
    share = x.grad.clone()
    dist.all_reduce(share)
    return loss.item(), share, own.grad, seen.numel, dict(seen.reduced)


def test_over_ranks_three_numbers_a_token_are_reduced_and_whole_logits_never_exist():
    torch.manual_seed(0)
    x, weight, targets = problem(400, vocab=201, width=8, dtype=torch.float32)
    expected = plain(x, weight, targets)
    expected.backward()
    results = run_ranks(2, _over_two_ranks)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), weight.grad)
    for loss, grad_x, _, largest, reduced in results:
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(grad_x, x.grad)
        assert largest <= 400 * 8  # x itself; all logits of a rank are 400 x 100
        assert reduced == {((20,), "max"): 20, ((2, 20), "sum"): 20}


def test_chunk_fits_its_budget():
    assert chunk_tokens(128256) == 130 and chunk_tokens(10**9) == 16


def test_without_gradients_none_are_made():
    x, weight, targets = problem(20, vocab=50)
    with torch.no_grad(), Largest() as seen:
        loss, _ = linear_cross_entropy(x, weight, targets, chunk=1)
    assert not loss.requires_grad and abs(loss.item() - plain(x, weight, targets).item()) < 1e-10
    assert seen.numel < weight.numel() + 1  # nothing of the weight gradient's or more elements


@pytest.mark.parametrize(
    ("shapes", "chunk", "text"),
    [
        (((4, 3), (7, 2), (4,)), None, r"loss: x and weight must be \[tokens, width\]"),
        (((4, 3), (7, 3), (5,)), None, r"loss: targets must have 4 entries, got \(5,\)"),
        (((4, 3), (7, 3), (4,)), 0, r"loss: chunk must be at least 1, got 0"),
    ],
)
def test_refusals(shapes, chunk, text):
    x, weight = torch.zeros(shapes[0]), torch.zeros(shapes[1])
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(x, weight, torch.zeros(shapes[2], dtype=torch.int64), chunk=chunk)
