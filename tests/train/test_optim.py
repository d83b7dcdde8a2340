import math

import pytest
import torch
from torch import nn

from ridgeline.train.config import OptimConfig
from ridgeline.train.optim import PartOptimizer, clip_gradients, learning_rate, warmup_steps


def test_schedule_values():
    config = OptimConfig(lr=2.0, min_lr_ratio=0.25, warmup_steps=4)
    found = [learning_rate(step, 13, config) for step in range(13)]
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4] == 2.0 and found[12] == pytest.approx(0.5)
    assert found[8] == pytest.approx(0.5 + 1.5 / 2)  # half of the cosine
    assert found[6] == pytest.approx(0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert found[4:] == sorted(found[4:], reverse=True)


def test_schedule_at_its_edges():
    assert learning_rate(0, 1, OptimConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.5)) == 0.5
    assert learning_rate(0, 5, OptimConfig(lr=1.0, warmup_steps=0)) == 1.0
    assert learning_rate(4, 5, OptimConfig(lr=1.0, warmup_steps=5)) == 1.0
    assert learning_rate(100, 5, OptimConfig(lr=1.0, warmup_steps=0)) == pytest.approx(0.1)


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return {
        "layer.weight": nn.Parameter(torch.randn(5, 3).to(dtype)),
        "layer.bias": nn.Parameter(torch.randn(5).to(dtype)),
    }


def test_steps_equal_the_formula():
    config = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    named = parameters()
    part = PartOptimizer(named.items(), config)
    exact = {name: p.detach().double() for name, p in named.items()}
    m = {name: torch.zeros_like(p) for name, p in exact.items()}
    v = {name: torch.zeros_like(p) for name, p in exact.items()}
    for step in range(1, 5):
        lr = 0.1 / step
        for name, p in named.items():
            p.grad = torch.randn_like(p)
            g = p.grad.double()
            decay = config.weight_decay if p.dim() == 2 else 0.0
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            update = (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.9**step)).sqrt() + 1e-3)
            exact[name] = exact[name] - lr * (update + decay * exact[name])
        part.step(lr)
        part.zero_grad()
    for name, p in named.items():
        assert p.grad is None
        torch.testing.assert_close(p.detach().double(), exact[name], rtol=1e-5, atol=1e-6)


def test_clip_is_over_all_parts():
    named = parameters()
    parts = [PartOptimizer([item], OptimConfig()) for item in named.items()]
    for p in named.values():
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in named.values()]
    wanted = math.sqrt(sum((g.double() ** 2).sum().item() for g in before))
    norm = clip_gradients(parts, None)
    assert norm.item() == pytest.approx(wanted, rel=1e-6)
    assert all(torch.equal(p.grad, g) for p, g in zip(named.values(), before, strict=True))
    assert clip_gradients(parts, 0.5).item() == pytest.approx(wanted, rel=1e-6)
    for p, g in zip(named.values(), before, strict=True):
        torch.testing.assert_close(p.grad, g * (0.5 / wanted), rtol=1e-5, atol=1e-7)
    assert clip_gradients(parts, 0.5).item() == pytest.approx(0.5, rel=1e-4)
    assert clip_gradients(parts, 10.0).item() == pytest.approx(0.5, rel=1e-4)  # below: untouched


def test_bf16_accumulates_and_steps_in_fp32():
    named = parameters(torch.bfloat16)
    part = PartOptimizer(named.items(), OptimConfig(weight_decay=0.0))
    weight, master = named["layer.weight"], part.masters["layer.weight"]
    assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weight)
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 is 256
        (weight * value).sum().backward()
    assert weight.grad is None and (master.grad == 258.0).all()
    start = master.detach().clone()
    for _ in range(3):  # steps smaller than half an ulp of bf16 still add up
        part.step(1e-4)
    torch.testing.assert_close(start - master.detach(), torch.full((5, 3), 3e-4), rtol=1e-2, atol=0)
    assert torch.equal(weight.detach(), master.detach().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bitwise(dtype):
    gradients = [torch.randn(2, 5, 3) for _ in range(2)]

    def advance(part, named, which):
        for gradient in gradients[which]:
            (named["layer.weight"] * gradient.to(dtype)).sum().backward()
            named["layer.bias"].sum().backward()
            part.step(0.1)
            part.zero_grad()

    named = parameters(dtype)
    part = PartOptimizer(named.items(), OptimConfig())
    advance(part, named, 0)
    state = {name: tensor.clone() for name, tensor in part.state_tensors().items()}
    masters = {name: master.detach().clone() for name, master in part.masters.items()}
    advance(part, named, 1)
    copied = parameters(dtype)
    other = PartOptimizer(copied.items(), OptimConfig())
    other.reset_state(stepped=True)
    with torch.no_grad():
        for name, tensor in other.state_tensors().items():
            tensor.copy_(state[name])
        for name, master in other.masters.items():
            master.copy_(masters[name])
    other.masters_changed()
    advance(other, copied, 1)
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert state.keys() == {f"{kind}.{name}" for kind in kinds for name in named}
    for name in named:
        assert torch.equal(named[name], copied[name])
    for name, tensor in part.state_tensors().items():
        assert torch.equal(tensor, other.state_tensors()[name])


def test_state_before_the_first_step_is_none():
    part = PartOptimizer(parameters().items(), OptimConfig())
    part.reset_state(stepped=True)
    assert len(part.state_tensors()) == 6
    part.reset_state(stepped=False)
    assert part.state_tensors() == {}


def test_frozen_parameters_stay():
    named = parameters()
    named["layer.bias"].requires_grad_(False)
    part = PartOptimizer(named.items(), OptimConfig())
    assert list(part.masters) == ["layer.weight"]


def test_warmup_is_a_tenth_of_a_short_run():
    assert [warmup_steps(steps, OptimConfig()) for steps in (1, 5, 40, 200, 9999)] == [
        0,
        0,
        4,
        20,
        20,
    ]
    assert warmup_steps(5, OptimConfig(warmup_steps=3)) == 3
    assert learning_rate(0, 40, OptimConfig(lr=1.0)) == 0.25
