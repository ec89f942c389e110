"""The losses of drawn programs, each of a training, its inputs and its targets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn import functional

from tests.soak.idioms.worlds import AVG


def _penalty(t: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = t.model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return functional.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def _gradient_norm(t: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(t.model(x), y)
    found = torch.autograd.grad(loss, t.parameters, create_graph=True, allow_unused=True)
    return loss + 0.1 * sum(each.square().sum() for each in found if each is not None)


def _inner_step(t: Any, x: Tensor, y: Tensor) -> Tensor:
    named = {name: p for name, p in t.net.named_parameters() if p.requires_grad}
    half = len(x) // 2
    loss = functional.mse_loss(t.model(x[:half]), y[:half])
    found = torch.autograd.grad(loss, [*named.values()], create_graph=True, allow_unused=True)
    fast = {n: p if g is None else p - 0.1 * g for (n, p), g in zip(named.items(), found, strict=True)}
    return loss + functional.mse_loss(functional_call(t.net, fast, (x,)), y)


def _balanced(t: Any, x: Tensor, y: Tensor) -> Tensor:
    out = t.model(x)
    losses = functional.mse_loss(out, y), out.abs().mean()
    last = t.parameters[-1]
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in losses]
    return losses[0] + losses[1] * (norms[0] / (norms[1] + 1e-3)).detach()


def _two_forwards(t: Any, x: Tensor, y: Tensor) -> Tensor:
    first, second = t.model(x), t.model(x * 1.1)
    return functional.mse_loss(first, y) + functional.mse_loss(first, second)


def _triplet(t: Any, x: Tensor, y: Tensor) -> Tensor:
    anchor, near, far = t.model(x), t.model(x + 0.1), t.model(-x)
    return functional.relu((anchor - near).norm(dim=1) - (anchor - far).norm(dim=1) + 1).mean() + anchor.square().mean()


def _target(t: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = t.model(x * 0.9)
    out = t.model(x)
    return functional.mse_loss(out, y) + functional.mse_loss(out, target)


def _evaluated(t: Any, x: Tensor, y: Tensor) -> Tensor:
    t.model.eval()
    with torch.no_grad():
        target = t.model(x)
    t.model.train()
    out = t.model(x)
    return functional.mse_loss(out, y) + 0.1 * (out - target).square().mean()


def _hooked(t: Any, x: Tensor, y: Tensor) -> Tensor:
    out = t.model(x)
    out.register_hook(lambda gradient: gradient * (1 + gradient.abs().mean()))
    return functional.mse_loss(out, y)


def _by_all_rows(t: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = t.world.all_reduce(torch.tensor(float(len(x))))
    return (t.model(x) - y).square().sum() / rows


def _above_mean(t: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(t.model(x), y)
    mean = t.world.all_reduce(loss.detach().clone(), AVG)
    return loss * (1 + (loss.detach() > mean))


def _tangent(t: Any, x: Tensor, y: Tensor) -> Tensor:
    out, named = t.model(x), dict(t.net.named_parameters())
    _, slope = jvp(lambda z: functional_call(t.net, named, (z,)), (x,), (torch.ones_like(x),))
    return functional.mse_loss(out, y) + 0.1 * slope.square().mean()


def _adversarial(t: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(functional.mse_loss(t.net(z), y), z)
    return functional.mse_loss(t.model(x + 0.1 * slope.sign()), y)


def _mixed(t: Any, x: Tensor, y: Tensor) -> Tensor:
    share = 0.3 + 0.1 * (t.progress.steps % 3)
    return functional.mse_loss(t.model(share * x + (1 - share) * x.flip(0)), share * y + (1 - share) * y.flip(0))


def _hardest(t: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.huber_loss(t.model(x), y, reduction="none").mean(1).topk(len(x) // 2).values.mean()


def _saved(t: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return functional.mse_loss(t.model(x), y)


def _contrast(t: Any, x: Tensor, ours: bool) -> Tensor:
    world, out = t.world, functional.normalize(t.model(x), dim=1)
    rows = world.rows(t.join, out) if ours else world.rows_of_all(t.join, out)
    place = t.join.active_ranks.index(world.rank) if world.rank in t.join.active_ranks else 0
    labels = torch.arange(len(x)) + len(x) * (place if ours or world.reference else world.rank)
    return world.own(functional.cross_entropy(3 * out @ rows.T, labels))


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "simple": lambda t, x, y: functional.mse_loss(t.model(x), y),
    "regularized": lambda t, x, y: functional.mse_loss(t.model(x), y) + 1e-2 * sum(p.abs().sum() for p in t.parameters),
    "penalty": _penalty,
    "gradient norm": _gradient_norm,
    "inner step": _inner_step,
    "balanced": _balanced,
    "two forwards": _two_forwards,
    "triplet": _triplet,
    "target": _target,
    "evaluated": _evaluated,
    "hooked": _hooked,
    "by all rows": _by_all_rows,
    "above mean": _above_mean,
    "tangent": _tangent,
    "adversarial": _adversarial,
    "mixed": _mixed,
    "hardest": _hardest,
    "saved": _saved,
    "contrast": lambda t, x, y: _contrast(t, x, True),
    "contrast of a package": lambda t, x, y: _contrast(t, x, False),
}
