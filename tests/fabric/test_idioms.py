"""The loops of Fabric's own examples, on uneven shards, against one process in float64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from tqdm import tqdm

from lightning_join.fabric import DDPJoinStrategy
from tests.support.front_ends.fabric import fabric_of, to_the_end
from tests.support.workers import Workers

LENGTHS = (1, 4, 2)
W = len(LENGTHS)


def data(rank: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(2 * LENGTHS[rank], 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1).gt(0).long())


def network(seed: int, *sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(sizes[0], 5), nn.Tanh(), nn.Linear(5, sizes[1])).double()


class Alone:
    """Does in one process what Fabric's ranks do: each loss counts one part in as many as there are ranks."""

    strategy: Any = None

    def __init__(self) -> None:
        self.printed: list[str] = []

    def setup(self, model: nn.Module, *optimizers: Any) -> Any:
        return (model, *optimizers)

    def backward(self, loss: Tensor) -> None:
        (loss / W).backward()

    def clip_gradients(self, model: nn.Module, _: Any, clip_val: float) -> None:
        nn.utils.clip_grad_value_(model.parameters(), clip_val)

    def loop(self, seed: int = 0) -> Any:
        """Yield each step's batches, of all ranks."""
        loaders = [iter(DataLoader(data(rank, seed), 2)) for rank in range(W)]
        while batches := [batch for loader in loaders if (batch := next(loader, None)) is not None]:
            yield batches


class Together:
    """The same on one of several ranks."""

    def __init__(self, rank: int) -> None:
        self.fabric = fabric_of(W, DDPJoinStrategy())
        self.rank = rank
        self.setup, self.backward = self.fabric.setup, self.fabric.backward
        self.clip_gradients, self.strategy = self.fabric.clip_gradients, self.fabric.strategy
        self.loaders: dict[int, Any] = {}

    def loop(self, seed: int = 0) -> Any:
        if seed not in self.loaders:
            loader: Any = DataLoader(data(self.rank, seed), 2)
            self.loaders[seed] = self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        for batch in tqdm(self.loaders[seed], disable=True):
            yield [batch]


def image_classifier(run: Any) -> list[nn.Module]:
    """A scheduler that is made after the set-up, and steps between the epochs; a metric over all ranks."""
    net = network(0, 4, 2)
    model, optimizer = run.setup(net, torch.optim.Adadelta(net.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(getattr(optimizer, "optimizer", optimizer), step_size=1, gamma=0.7)
    accuracy = MeanMetric()
    for _ in range(3):
        for batches in run.loop():
            optimizer.zero_grad()
            for x, y in batches:
                run.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for batches in run.loop(1):
                for x, y in batches:
                    accuracy.update(model(x).argmax(1).eq(y).double())
        found = float(accuracy.compute())
        accuracy.reset()
    net.accuracy = nn.Parameter(torch.tensor([found], dtype=torch.float64))
    return [net]


def language_model(run: Any) -> list[nn.Module]:
    """Clipping by value."""
    net = network(0, 4, 2)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.3))
    for _ in range(3):
        for batches in run.loop():
            for x, y in batches:
                run.backward(functional.nll_loss(model(x).log_softmax(1), y))
            run.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            optimizer.zero_grad()
    return [net]


def folds(run: Any) -> list[nn.Module]:
    """All models are set up before, and each loop trains one of them."""
    nets = [network(seed, 4, 2) for seed in range(3)]
    pairs = [run.setup(net, torch.optim.Adadelta(net.parameters())) for net in nets]
    for _ in range(2):
        for fold, (model, optimizer) in enumerate(pairs):
            for batches in run.loop(fold):
                optimizer.zero_grad()
                for x, y in batches:
                    run.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
    return nets


def adversaries(run: Any) -> list[nn.Module]:
    """Two backwards of the one before its step; the other's gradients go through it, where they are not wanted."""
    makes, judges = network(0, 4, 4), network(1, 4, 1)
    judge, second = run.setup(judges, torch.optim.Adam(judges.parameters(), betas=(0.5, 0.999)))
    maker, first = run.setup(makes, torch.optim.Adam(makes.parameters(), betas=(0.5, 0.999)))
    loss = functional.binary_cross_entropy_with_logits
    for _ in range(2):
        for batches in run.loop():
            judge.zero_grad()
            fakes = []
            for x, _ in batches:
                output = judge(x).view(-1)
                run.backward(loss(output, torch.ones_like(output)))
            for x, _ in batches:
                fakes.append(maker(x.flip(1)))
                output = judge(fakes[-1].detach()).view(-1)
                run.backward(loss(output, torch.zeros_like(output)))
            second.step()
            maker.zero_grad()
            for fake in fakes:
                output = judge(fake).view(-1)
                run.backward(loss(output, torch.ones_like(output)))
            first.step()
    return [makes, judges]


def own_trainer(run: Any) -> list[nn.Module]:
    """The step runs forward and backward, as its closure; other batches only add to the gradients."""
    net = network(0, 4, 2)
    model, optimizer = run.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))

    def training_step(batches: Any) -> Tensor:
        losses = [functional.cross_entropy(model(x), y) for x, y in batches]
        for loss in losses:
            run.backward(loss)
        return losses[0]

    for _ in range(3):
        for step, batches in enumerate(run.loop()):
            if step % 2 == 0:
                optimizer.step(partial(training_step, batches))
                optimizer.zero_grad()
            else:
                training_step(batches)
    return [net]


IDIOMS = (image_classifier, language_model, folds, adversaries, own_trainer)


def run_together(rank: int, idiom: Any) -> list[Tensor]:
    run = Together(rank)
    nets = idiom(run)
    run.fabric.barrier()
    return [p.detach() for net in nets for p in net.parameters()]


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_a_loop_of_fabrics_examples(workers: Workers, idiom: Any) -> None:
    expected = [p.detach() for net in idiom(Alone()) for p in net.parameters()]
    found = workers.run(W, to_the_end, run_together, idiom)
    for mine in found:
        assert all(torch.equal(one, other) for one, other in zip(mine, found[0], strict=True))
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
