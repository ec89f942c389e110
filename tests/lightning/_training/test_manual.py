"""Manual optimization: whatever `training_step` does to train, ranks without a batch do too, at every step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_join import _compat
from tests.support.front_ends.lightning import Fit, Module, build_trainer, fit
from tests.support.run import CLASSES, FEATURES, Batch, difference, flatten, loss_of
from tests.support.workers import Workers

Loss = Callable[[Batch], Tensor]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.g = nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))
        self.d = nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1))
        self.target = nn.Linear(CLASSES, 4).requires_grad_(False)
        self.double()

    def build(self) -> tuple[list[Any], list[Any]]:
        optimizers = [torch.optim.Adam(self.g.parameters(), lr=0.02), torch.optim.Adam(self.d.parameters(), lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.8) for o in optimizers]

    def fool(self, batch: Batch) -> Tensor:
        return (self.d(self.g(batch[0])) - 1).pow(2).mean()

    def tell(self, batch: Batch) -> Tensor:
        return self.d(self.g(batch[0]).detach()).pow(2).mean() + (self.d(batch[1]) - 1).pow(2).mean()


# ---------------------------------------------------------------- what a user writes


def gan(do: Any, net: Gan, index: int) -> None:
    """Two optimizers, toggled, each clipped in its own way; weight clipping; a schedule of its own for each."""
    (g, d), (slow, fast) = do.optimizers, do.schedulers
    with do.toggled(g):
        g.zero_grad()
        do.backward(net.fool)
        do.clip(g, 0.05, "norm")
        g.step()
    with do.toggled(d):
        do.backward(net.tell)
        do.clip(d, 0.03, "value")
        d.step()
        for p in net.d.parameters():
            p.data.clamp_(-0.4, 0.4)
        d.zero_grad()
    fast.step()
    if index % 2:
        slow.step()


def window(do: Any, net: Gan, index: int) -> None:
    """Several backwards per step, and a step every two batches."""
    g, d = do.optimizers
    do.backward(net.fool)
    do.backward(lambda batch: net.fool(batch).square() + net.tell(batch))
    if index % 2:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        g.step()
        d.step()
        g.zero_grad(set_to_none=False)
        d.zero_grad()
        do.schedulers[0].step()


def closures(do: Any, net: Gan, index: int) -> None:
    """A closure; then gradients made by hand, a learning rate set by hand, a target network."""
    g, d = do.optimizers

    def closure() -> None:
        g.zero_grad()
        do.backward(net.fool)

    g.step(closure=closure)
    d.zero_grad()
    do.backward(net.tell)
    for p in net.d.parameters():
        if p.grad is not None:
            p.grad = 2 * p.grad + 0.01
    d.param_groups[0]["lr"] *= 0.97
    d.step()
    net.target.weight.data.lerp_(net.d[0].weight.data, 0.1)


def local(do: Any, net: Gan, index: int) -> None:
    """Gradients are averaged every other step only."""
    (g, _), synced = do.optimizers, index % 2 == 1
    with do.toggled(g, synced):
        do.backward(net.fool)
        if synced:
            g.step()
            g.zero_grad()


PROGRAMS = {program.__name__: program for program in (gan, window, closures, local)}


# ---------------------------------------------------------------- one plain process


State = tuple[dict[str, Tensor], Any, Any]


def state_of(net: Gan, optimizers: list[Any], schedulers: list[Any]) -> State:
    return copy.deepcopy((net.state_dict(), [o.state_dict() for o in optimizers], [s.state_dict() for s in schedulers]))


@dataclass
class Alone:
    """One process that applies the formulas to the batches of all ranks."""

    case: Fit
    net: Gan = field(default_factory=Gan)
    history: list[State] = field(default_factory=list)

    def run(self, program: str) -> list[State]:
        self.optimizers, self.schedulers = self.net.build()
        for epoch in range(self.case.epochs):
            for index, row in enumerate(self.case.rows(epoch)):
                self.batches = {rank: self.case.batch(owner, epoch, place) for rank, (owner, place) in row.items()}
                # Every rank starts from the same buffers; those of the lowest rank are kept.
                self.buffers = {rank: copy.deepcopy(dict(self.net.named_buffers())) for rank in self.batches}
                PROGRAMS[program](self, self.net, index)
                self.use_buffers(min(self.batches))
                self.history.append(state_of(self.net, self.optimizers, self.schedulers))
        return self.history

    def use_buffers(self, rank: int) -> None:
        for name, buffer in self.net.named_buffers():
            buffer.copy_(self.buffers[rank][name])

    def backward(self, loss: Loss) -> None:
        weight = self.case.weights(self.batches, 0)
        for rank, batch in self.batches.items():
            self.use_buffers(rank)
            (loss(batch) * weight[rank]).backward()
            self.buffers[rank] = copy.deepcopy(dict(self.net.named_buffers()))

    @contextmanager
    def toggled(self, optimizer: torch.optim.Optimizer, synced: bool = True) -> Iterator[None]:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [p for p in self.net.parameters() if p.requires_grad and id(p) not in mine]
        for p in others:
            p.requires_grad = False
        yield
        for p in others:
            p.requires_grad = True

    def clip(self, optimizer: torch.optim.Optimizer, value: float, how: str) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)


# ---------------------------------------------------------------- Lightning's ranks


class Manual(Module):
    def __init__(self, case: Fit, program: str) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.net = Gan()  # type: ignore[assignment]
        self.program = program
        self.history: list[State] = []
        self.progress: list[Any] = []
        self.hooks: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = self.net.build()  # type: ignore[operator]
        return optimizers, schedulers

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.trained.append((self.trainer.current_epoch, batch_idx))
        self.batch = batch
        PROGRAMS[self.program](Do(self), self.net, batch_idx)  # type: ignore[arg-type]

    def on_after_backward(self) -> None:
        self.hooks.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # What a hook does all ranks do by themselves, with one another.
        norm = torch.stack([p.grad.norm() for group in optimizer.param_groups for p in group["params"]]).sum()
        self.hooks.append(f"{float(self.trainer.strategy.reduce(norm, reduce_op='sum')):.12e}")

    def on_train_batch_end(self, *_: Any) -> None:
        trainer: Any = self.trainer
        self.history.append(state_of(self.net, trainer.optimizers, self.schedulers))  # type: ignore[arg-type]
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.state_dict()
        self.progress.append((trainer.global_step, progress))

    @property
    def schedulers(self) -> Any:
        return self.lr_schedulers()


class Do:
    """What a program does, in Lightning's words."""

    def __init__(self, module: Manual) -> None:
        self.module = module
        self.optimizers, self.schedulers = module.optimizers(), module.schedulers

    def backward(self, loss: Loss) -> None:
        self.module.manual_backward(loss(self.module.batch))

    def toggled(self, optimizer: Any, synced: bool = True) -> Any:
        return optimizer.toggle_model(sync_grad=synced)

    def clip(self, optimizer: Any, value: float, how: str) -> None:
        self.module.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=how)


Ran = tuple[list[State], list[Any], list[str], Any]


def fit_manual(rank: int, case: Fit, program: str, folder: str | None) -> Ran:
    module = Manual(case, program)
    options: dict[str, Any] = {}
    if folder is not None:
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        options = {"callbacks": [saving], "enable_checkpointing": True}
    build_trainer(case, **options).fit(module)
    return module.history, module.progress, module.hooks, module.trained


def assert_equal_bits(one: Any, other: Any, where: Any) -> None:
    mine, its = flatten(one), flatten(other)
    assert len(mine) == len(its)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True)), where


def assert_close(ours: Any, theirs: Any, where: Any) -> None:
    mine, its = flatten(as_dict(ours)), flatten(as_dict(theirs))
    assert len(mine) == len(its)
    assert all(difference([a], [b]) < 1e-10 for a, b in zip(mine, its, strict=True)), where


def as_dict(values: Any) -> dict[int, Any]:
    return dict(enumerate(values))


UNUSED = {"find_unused_parameters": True}
CASES = {
    "gan": ("gan", Fit((2, 5), epochs=2, ddp=UNUSED)),
    "gan-0-first-samples": ("gan", Fit((0, 5, 3), epochs=2, weighting="samples", ragged=True, ddp=UNUSED)),
    "gan-rank-0-last": ("gan", Fit((5, 0, 3), epochs=2, weighting="active", ddp=UNUSED)),
    "window": ("window", Fit((3, 6), epochs=2, weighting="samples", ragged=True)),
    "window-streams": ("window", Fit((1, 5, 3), epochs=2, iterable=True, weighting="active")),
    "window-views": ("window", Fit((5, 2), epochs=2, ddp={"gradient_as_bucket_view": True})),
    "closures": ("closures", Fit((2, 5), epochs=2, weighting="active", ddp=UNUSED)),
    "closures-three": ("closures", Fit((5, 0, 3), epochs=2, ddp=UNUSED)),
    "window-static": ("window", Fit((0, 3), ddp={"static_graph": True})),
    "local": ("local", Fit((3, 6), epochs=2, ddp=UNUSED)),
    "gan-rebalanced": ("gan", Fit((0, 5, 2), epochs=2, weighting="samples", ragged=True, ddp=UNUSED, rebalance=True)),
    "window-streams-rebalanced": ("window", Fit((1, 6, 0), epochs=2, iterable=True, rebalance=True)),
}


STATIC = pytest.mark.skipif(
    not _compat.AVERAGES_FIRST_OF_STATIC_GRAPH, reason="needs Lightning's average of a static graph's first gradients"
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=STATIC if "static" in name else ()) for name in CASES])
def test_every_step_is_the_references_on_all_ranks(workers: Workers, name: str, tmp_path: Path) -> None:
    program, case = CASES[name]
    saves = program == "gan"
    results: list[Ran] = workers.run(case.world_size, fit_manual, case, program, str(tmp_path) if saves else None)
    expected = Alone(case).run(program)
    first, progress, hooks, _ = results[0]
    assert len(first) == len(expected) == sum(case.length(epoch) for epoch in range(case.epochs))
    buffers = [key for key in expected[0][0] if key not in dict(Gan().named_parameters())]
    for rank, (history, its_progress, its_hooks, trained) in enumerate(results):
        assert trained == [(e, i) for e in range(case.epochs) for i, row in enumerate(case.rows(e)) if rank in row]
        assert its_progress == progress
        assert its_hooks == hooks
        for step, (mine, theirs) in enumerate(zip(history, first, strict=True)):
            where = (name, rank, step)
            parameters = [{k: v for k, v in state[0].items() if k not in buffers} for state in (mine, theirs)]
            assert_equal_bits(parameters[0], parameters[1], where)
            assert_equal_bits(as_dict(mine[1]), as_dict(theirs[1]), where)
            assert [o["param_groups"] for o in mine[1]] == [o["param_groups"] for o in theirs[1]], where
            assert mine[2] == theirs[2], where
    for step, (ours, reference) in enumerate(zip(first, expected, strict=True)):
        assert difference(flatten(ours[0]), flatten(reference[0])) < 1e-10, (name, step)
        assert_close(ours[1], reference[1], (name, step))
        assert [o["param_groups"] for o in ours[1]] == [o["param_groups"] for o in reference[1]]
        assert ours[2] == reference[2]
    if saves:
        files = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
        assert len(files) == len(expected) // 2
        for path in files:
            saved = torch.load(path, "cpu", weights_only=False)
            state, optimizers, schedulers = expected[saved["global_step"] // 2 - 1]
            assert difference([saved["state_dict"][f"net.{k}"] for k in state], list(state.values())) < 1e-10
            assert_close(saved["optimizer_states"], optimizers, path)
            assert saved["lr_schedulers"] == schedulers


# ---------------------------------------------------------------- what hooks do with others


class Syncing(Manual):
    """A hook that all ranks run by themselves syncs a metric and logs a value that is reduced."""

    def __init__(self, case: Fit) -> None:
        super().__init__(case, "syncing")
        self.mean = MeanMetric()
        self.means: list[float] = []
        self.logged: list[float] = []
        self.noted = self.means, self.logged

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net.fool(batch) + self.net.tell(batch))  # type: ignore[operator]
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        value = 10.0 * self.trainer.global_rank + len(self.means)
        self.mean.reset()
        self.mean.update(value)
        self.means.append(float(self.mean.compute()))
        self.log("value", value, on_step=True, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["value"]))


@pytest.mark.parametrize("lengths", [(2, 5), (5, 0, 3)])
def test_a_hook_that_all_ranks_run_announces_nothing(workers: Workers, lengths: tuple[int, ...]) -> None:
    # In the tail too: a joined rank takes part of its own accord, and would take an announcement for something else.
    expected = [10.0 * (len(lengths) - 1) / 2 + step for step in range(max(lengths))]
    case = Fit(lengths, epochs=1, ddp=UNUSED)
    for result in workers.run(len(lengths), fit, case, Syncing):
        means, logged = result.noted
        assert means == logged == pytest.approx(expected)


# ---------------------------------------------------------------- what cannot be repeated


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Misused(Manual):
    """Goes wrong at batch 3, which is in the tail."""

    def configure_optimizers(self) -> Any:
        return (Twice if self.program == "twice" else torch.optim.SGD)(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        wrong = batch_idx == 3
        optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=not (wrong and self.program in ("local", "clipped"))):
            self.manual_backward(self.net.fool(batch) + self.net.tell(batch))  # type: ignore[operator]
        if wrong and self.program == "clipped":
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e-3)
            self.manual_backward(self.net.fool(batch))  # type: ignore[operator]
        if wrong and self.program == "stops":
            next(iter(()))
        if wrong and self.program == "raw":
            optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("raw", "UnsupportedError: SGD.step() was called directly in `training_step`"),
        ("twice", "UnsupportedError: Twice evaluates its closure more than once"),
        ("local", "UnsupportedError: An optimizer was stepped with 9 gradients that were not averaged"),
        ("clipped", "was modified by hand (clipping, scaling, noise) between backwards without a sync"),
        ("stops", "JoinError: A step or a hook raised StopIteration"),
    ],
)
def test_what_cannot_be_repeated_raises_on_all_ranks(workers: Workers, program: str, text: str) -> None:
    joined, active = workers.outcomes(2, fit, Fit((2, 4), epochs=1, ddp=UNUSED), partial(Misused, program=program))
    assert text in active.error, active.trace
    assert text in joined.error or "PeerFailedError: Rank 1 failed" in joined.error, joined.trace


# ---------------------------------------------------------------- a loss that does not lead to the model


class Skips(Module):
    """Takes a constant for a loss at some steps of one rank, or the same number with zero gradients."""

    is_constant: bool

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = loss_of(self.net, batch)
        if (self.trainer.global_rank + batch_idx) % 3 == 1:
            loss = torch.zeros((), requires_grad=True) if self.is_constant else 0.0 * loss
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("options", [{"hooked": True}, {"ddp": {"find_unused_parameters": True}}])
def test_a_constant_loss_brings_nothing_and_keeps_nobody_waiting(workers: Workers, options: dict[str, Any]) -> None:
    case = Fit((4, 6, 1), epochs=2, optimizer="sgd", **options)
    given = {"automatic_optimization": False}
    expected = workers.run(3, fit, case, Skips, {**given, "is_constant": False})
    for result in workers.run(3, fit, case, Skips, {**given, "is_constant": True}):
        assert difference(result.parameters, expected[0].parameters) < 1e-10
