"""The forms of a step: what a drawn program does with each batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.soak.idioms.training import Training


def plain(t: Training, batch: Any, number: int) -> None:
    t.clear()
    loss = t.backward(*batch)
    t.communicate(loss)
    t.update()


def clears_after(t: Training, batch: Any, number: int) -> None:
    loss = t.backward(*batch)
    t.update()
    t.clear()
    t.communicate(loss)


def over_windows(t: Training, batch: Any, number: int) -> None:
    t.clear()
    rows = sum(len(x) for x, _ in batch)
    for place, (x, y) in enumerate(batch):
        loss = t.backward(x, y, len(x) / rows, synced=place + 1 == len(batch))
    t.update()
    t.communicate(loss)


def unsynced(t: Training, batch: Any, number: int) -> None:
    """Accumulate over two batches, the first of them under `no_sync`."""
    if number % 2 == 0:
        t.clear()
    loss = t.backward(*batch, 0.5, synced=number % 2 == 1)
    t.communicate(loss)
    if number % 2 == 1:
        t.update()


def _over_epochs(t: Training, batch: Any, synced: bool) -> None:
    last = t.progress.micro % 3 == 2
    t.backward(*batch, 1 / 3, synced=synced or last)
    t.progress.micro += 1
    if last:
        t.update()
        t.clear()


def unsynced_over_epochs(t: Training, batch: Any, number: int) -> None:
    """Accumulate over three batches, by a count that goes on from epoch to epoch."""
    _over_epochs(t, batch, False)


def synced_over_epochs(t: Training, batch: Any, number: int) -> None:
    _over_epochs(t, batch, True)


def two_backwards(t: Training, batch: Any, number: int) -> None:
    x, y = batch
    t.clear()
    t.backward(x, y)
    loss = t.backward(x * 0.5, y, 0.5)
    t.update()
    t.communicate(loss)


def _ascend(t: Training) -> list[Tensor]:
    """Go up along the gradients; return where the parameters were."""
    before = [p.detach().clone() for p in t.parameters]
    norm = torch.stack([g.abs().square().sum() for g in t.gradients]).sum().sqrt() + 1e-12
    with torch.no_grad():
        for p in t.parameters:
            if p.grad is not None:
                p.add_(0.05 * p.grad / norm)
    return before


def _put_back(t: Training, before: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(t.parameters, before, strict=True):
            p.copy_(value)


def sharpness(t: Training, batch: Any, number: int) -> None:
    """SAM."""
    t.clear()
    t.backward(*batch)
    before = _ascend(t)
    t.clear()
    loss = t.backward(*batch)
    _put_back(t, before)
    t.update()
    t.communicate(loss)


def own_sharpness(t: Training, batch: Any, number: int) -> None:
    """SAM, of which each rank goes up along its own gradient."""
    t.clear()
    t.backward(*batch, synced=False)
    before = _ascend(t)
    t.clear()
    t.backward(*batch)
    _put_back(t, before)
    t.update()


def extragradient(t: Training, batch: Any, number: int) -> None:
    t.clear()
    t.backward(*batch)
    before = [p.detach().clone() for p in t.parameters]
    with torch.no_grad():
        for p in t.parameters:
            if p.grad is not None:
                p.sub_(0.05 * p.grad)
    t.clear()
    t.backward(*batch)
    _put_back(t, before)
    t.update()


def free_adversary(t: Training, batch: Any, number: int) -> None:
    """Step twice on a batch, the second time on inputs that the first one has changed."""
    x, y = batch
    changed = x.clone()
    for _ in range(2):
        changed.requires_grad_()
        t.clear()
        t.backward(changed, y)
        if changed.grad is not None:
            changed = (changed + 0.01 * changed.grad.sign()).detach()
        t.update()


def closure(t: Training, batch: Any, number: int) -> None:
    def evaluate() -> Tensor:
        t.clear()
        loss = t.backward(*batch)
        t.change_gradients()
        return loss

    loss = torch.tensor(0.0)
    for optimizer in t.plain:
        loss = optimizer.step(evaluate)
    t.progress.steps += 1
    t.follow()
    t.communicate(loss)


def adversaries(t: Training, batch: Any, number: int) -> None:
    """GAN: the model makes outputs, and another one tells them from targets."""
    x, y = batch
    critic, fake = t.other, t.model(x)
    t.optimizers[-1].zero_grad()
    (functional.softplus(critic(fake.detach())).mean() + functional.softplus(-critic(y)).mean()).backward()
    t.update(len(t.optimizers) - 1)
    t.clear()
    loss = functional.softplus(-critic(fake)).mean()
    loss.backward()
    t.update(*range(len(t.optimizers) - 1))
    t.communicate(loss.detach())


def two_models(t: Training, batch: Any, number: int) -> None:
    """One loss through two models."""
    x, y = batch
    t.clear()
    loss = functional.mse_loss(t.other(t.model(x)), y[:, :1])
    loss.backward()
    t.communicate(loss.detach())
    t.update()


def _own_reduction(t: Training, batch: Any, average: bool) -> None:
    t.clear()
    t.backward(*batch, synced=False)
    for gradient in t.gradients:
        t.world.reduce_gradient(gradient, average)
    t.update()


def own_average(t: Training, batch: Any, number: int) -> None:
    """Average the gradients of `no_sync` by hand."""
    _own_reduction(t, batch, True)


def own_sum(t: Training, batch: Any, number: int) -> None:
    """Sum them, and divide by the number of ranks."""
    _own_reduction(t, batch, False)


def surgery(t: Training, batch: Any, number: int) -> None:
    """Project the gradients of two losses on each other, and step along their sum."""
    x, y = batch
    found = []
    for inputs in (x, -0.7 * x):
        t.clear()
        t.backward(inputs, y)
        found.append([None if p.grad is None else p.grad.clone() for p in t.parameters])
    for p, a, b in zip(t.parameters, *found, strict=True):
        if a is not None and b is not None:
            dot = (a * b).sum()
            p.grad = a + b - (dot / (b.square().sum() + 1e-9) * b if dot.real < 0 else 0)
    t.update()


def skips(t: Training, batch: Any, number: int) -> None:
    """Only look at every third batch."""
    if t.progress.micro % 3 == 2:
        with torch.no_grad():
            t.model(batch[0])
    else:
        plain(t, batch, number)
    t.progress.micro += 1


def alternates(t: Training, batch: Any, number: int) -> None:
    """Step one of two optimizers, in turns."""
    t.clear()
    loss = t.backward(*batch)
    t.update(t.progress.steps % len(t.optimizers))
    t.communicate(loss)


STEPS: dict[str, Callable[[Training, Any, int], None]] = {
    "plain": plain,
    "clears after": clears_after,
    "over windows": over_windows,
    "unsynced": unsynced,
    "unsynced over epochs": unsynced_over_epochs,
    "synced over epochs": synced_over_epochs,
    "two backwards": two_backwards,
    "sharpness": sharpness,
    "own sharpness": own_sharpness,
    "extragradient": extragradient,
    "free adversary": free_adversary,
    "closure": closure,
    "adversaries": adversaries,
    "two models": two_models,
    "own average": own_average,
    "own sum": own_sum,
    "surgery": surgery,
    "skips": skips,
    "alternates": alternates,
}
