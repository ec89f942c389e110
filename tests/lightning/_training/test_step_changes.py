"""What `training_step` changes besides its loss: on ranks without a batch too, where it is read."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, ModelPruning
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils.prune import L1Unstructured, global_unstructured

import lightning_join
from tests.support import sharded_fits as sharded
from tests.support.front_ends import lightning as fits
from tests.support.front_ends.lightning import build_trainer
from tests.support.run import Batch, difference
from tests.support.small import steps_of
from tests.support.step_changes import EPOCHS, RATE, Student, alone, rows
from tests.support.student_module import StudentModule
from tests.support.warned import warned
from tests.support.workers import Workers

Lengths = tuple[int, ...]


class Module(StudentModule):
    def __init__(self, how: str, lengths: Lengths) -> None:
        super().__init__(Student(how), lengths, rows)


def fit(module: pl.LightningModule, world_size: int, **options: Any) -> pl.Trainer:
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        **{**quiet, **options},
        strategy=lightning_join.DDPJoinStrategy(),
        accelerator="cpu",
        devices=world_size,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    return trainer


def train(rank: int, lengths: Lengths, how: str) -> tuple[list[list[Tensor]], list[Any], list[str]]:
    """Return the states that each validation saw and those of checkpoints, and what was warned of."""
    module = Module(how, lengths)
    with tempfile.TemporaryDirectory() as folder, warned("the ranks differ") as said:
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        fit(module, len(lengths), val_check_interval=1, callbacks=[saving], enable_checkpointing=True)
        files = sorted(Path(folder).glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
        saved = [[*torch.load(path, weights_only=False)["state_dict"].values()] for path in files]
    return module.seen, saved, said


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["teacher", "projected", "decay", "rate", "state", "centre"])
@pytest.mark.parametrize("lengths", [(2, 5), (4, 0), (1, 4, 3)])
def test_ranks_without_a_batch_take_it(workers: Workers, lengths: Lengths, how: str) -> None:
    expected = alone(how, lengths)
    for rank, (seen, saved, said) in enumerate(workers.run(len(lengths), train, lengths, how)):
        assert max(map(difference, seen, expected)) < 1e-10
        if rank == 0:
            assert max(map(difference, saved, expected)) < 1e-10
            assert len(saved) == len(expected)
        assert len(seen) == len(expected)
        assert not said


class Pruned(Module):
    def parts(self) -> list[tuple[Any, str]]:
        return [(self.student.net[0], "weight"), (self.student.net[2], "weight")]


def prune(rank: int, lengths: Lengths) -> list[list[Tensor]]:
    module = Pruned("", lengths)
    options: Any = {"make_pruning_permanent": False, "use_lottery_ticket_hypothesis": False, "amount": 0.3}
    fit(
        module,
        len(lengths),
        callbacks=[ModelPruning(L1Unstructured, module.parts(), **options)],  # type: ignore[arg-type]
        limit_val_batches=0,
    )
    return [module.student.state()]


@pytest.mark.parametrize("lengths", [(2, 5), (3, 0)])
def test_weights_are_pruned_by_what_a_forward_has_set(workers: Workers, lengths: Lengths) -> None:
    alone = Pruned("", lengths)
    optimizer = alone.student.optimizer()
    for _ in range(EPOCHS):
        for places in steps_of(lengths):
            optimizer.zero_grad()
            for place in places:
                (alone.student.loss(rows(*place)) / len(lengths)).backward()
            optimizer.step()
        global_unstructured(alone.parts(), L1Unstructured, amount=0.3)
    for (state,) in workers.run(2, prune, lengths):
        assert difference(state, alone.student.state()) < 1e-10


class Norms(Callback):
    """Logs the gradients' norm, as many do."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in module.student.net.parameters()]).norm()
        module.log("norm", norm, on_step=True, on_epoch=True, sync_dist=True, batch_size=2)
        module.norms.append(float(norm))


def norms_by_lambda() -> Callback:
    return LambdaCallback(on_before_optimizer_step=partial(Norms.on_before_optimizer_step, None))  # type: ignore[arg-type]


class Logging(Module):
    def __init__(self, lengths: Lengths) -> None:
        super().__init__("", lengths)
        self.norms: list[float] = []


def log(rank: int, lengths: Lengths, how: str) -> tuple[float, float, float]:
    module = Logging(lengths)
    callback = norms_by_lambda() if how == "lambda" else Norms()
    trainer = fit(module, len(lengths), callbacks=[callback], limit_val_batches=0)
    last = module.norms[-max(lengths) :]
    found = trainer.callback_metrics
    # Each step's norm is of all ranks' batches, and counts as often as ranks have one.
    counts = [len(places) for places in steps_of(lengths)]
    expected = sum(norm * count for norm, count in zip(last, counts, strict=True)) / sum(counts)
    return float(found["norm_epoch"]), expected, float(found["norm_step"]) - last[-1]


@pytest.mark.parametrize(("lengths", "how"), [((2, 5), ""), ((3, 0), "lambda"), ((1, 4, 3), "")])
def test_gradient_norms_that_hooks_log_are_those_of_one_process(workers: Workers, lengths: Lengths, how: str) -> None:
    for found, expected, step in workers.run(len(lengths), log, lengths, how):
        assert found == pytest.approx(expected, abs=1e-6)
        assert step == pytest.approx(0, abs=1e-6)


class Rates:
    """Sets the learning rate in each step."""

    def training_step(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + self.trainer.global_step)
        return super().training_step(batch, batch_idx)  # type: ignore[misc,no-any-return]


class Replicated(Rates, fits.Module):
    pass


class Sharded(Rates, sharded.ShardedModule):
    pass


def fit_rates(rank: int, kind: str, case: fits.Fit) -> list[Tensor]:
    if kind != "ddp":
        return sharded.fit(rank, kind, case, Sharded).parameters
    module = Replicated(case)
    build_trainer(case).fit(module)
    return [p.detach().clone() for p in module.net.parameters()]


@pytest.mark.parametrize("lengths", [(2, 5), (4, 0)])
@pytest.mark.parametrize("kind", sharded.KINDS)
def test_joined_shards_are_stepped_with_the_rate_that_a_step_sets(
    workers: Workers, kind: str, lengths: Lengths
) -> None:
    case = fits.Fit(lengths)
    expected, _ = workers.run(2, fit_rates, "ddp", case)
    for found in workers.run(2, fit_rates, kind, case):
        assert difference(found, expected) < 1e-10


def train_zero(rank: int, lengths: Lengths, how: str) -> list[Tensor]:
    module = Module(how, lengths)
    module.student.optimizer = lambda: ZeroRedundancyOptimizer(  # type: ignore[method-assign]
        module.student.net.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9
    )
    fit(module, len(lengths), limit_val_batches=0)
    return module.student.state()


@pytest.mark.parametrize(("lengths", "how"), [((2, 5), "projected"), ((4, 0), "projected"), ((1, 4), "teacher")])
def test_zero_steps_a_joined_ranks_shard_from_what_the_step_has_set(
    workers: Workers, lengths: Lengths, how: str
) -> None:
    expected = alone(how, lengths)[-1]
    for state in workers.run(len(lengths), train_zero, lengths, how):
        assert difference(state, expected) < 1e-10


@pytest.mark.parametrize(("lengths", "how"), [((2, 5), "rate"), ((1, 4, 3), "decay")])
def test_zero_forgets_options_that_a_step_sets_on_all_ranks(workers: Workers, lengths: Lengths, how: str) -> None:
    """It reads them before the closure that runs the step, and resets them after it, as under plain `ddp`."""
    expected = alone("", lengths)[-1]
    for state in workers.run(len(lengths), train_zero, lengths, how):
        assert difference(state, expected) < 1e-10


class NoLoss(Module):
    def training_step(self, x: Tensor, index: int) -> Any:
        loss = super().training_step(x, index)
        return None if index == 4 else loss


def train_with_none(rank: int, zero: bool) -> list[Tensor]:
    module = NoLoss("", (2, 8))
    if zero:
        module.student.optimizer = lambda: ZeroRedundancyOptimizer(  # type: ignore[method-assign]
            module.student.net.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9
        )
    fit(module, 2, limit_val_batches=0, accumulate_grad_batches=2)
    return module.student.state()


def test_zero_takes_nothing_in_a_step_that_does_not_sync(workers: Workers) -> None:
    expected, _ = workers.run(2, train_with_none, False)
    for state in workers.run(2, train_with_none, True):
        assert difference(state, expected) < 1e-10


def train_normed(rank: int, zero: bool) -> list[Tensor]:
    module = Module("", (2, 5))
    module.student.net[1] = torch.nn.BatchNorm1d(5, dtype=torch.float64)
    if zero:
        module.student.optimizer = lambda: ZeroRedundancyOptimizer(  # type: ignore[method-assign]
            module.student.net.parameters(), torch.optim.SGD, lr=RATE, momentum=0.9
        )
    fit(module, 2, limit_val_batches=0)
    return module.student.state()


def test_zero_leaves_the_statistics_of_the_tail(workers: Workers) -> None:
    expected, _ = workers.run(2, train_normed, False)
    for state in workers.run(2, train_normed, True):
        assert difference(state, expected) < 1e-10


class Counting(pl.LightningModule):
    """A buffer that a transfer hook changes before the wrapper's forward decides the loss."""

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.lengths = torch.nn.Linear(2, 1).double(), lengths
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            [numbered(self.trainer.global_rank, step) for step in range(self.lengths[self.trainer.global_rank])]
        )

    def on_before_batch_transfer(self, batch: Any, _: int) -> Any:
        self.count += 1
        return batch

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) * (1 + self.count)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


def numbered(rank: int, step: int) -> Tensor:
    return torch.full((2,), rank + 1.0 + step, dtype=torch.float64)


def train_counting(_: int, lengths: Lengths) -> list[Tensor]:
    module = Counting(lengths)
    fit(module, len(lengths))
    return [tensor.detach() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("lengths", [(1, 3), (3, 0), (2, 1, 4)])
def test_a_buffer_that_a_transfer_hook_changes(workers: Workers, lengths: Lengths) -> None:
    module = Counting(lengths)
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for step in range(max(lengths)):
            active = [rank for rank, length in enumerate(lengths) if step < length]
            module.count += 1
            optimizer.zero_grad()
            torch.stack([module.loss(numbered(rank, step)) for rank in active]).sum().div(len(lengths)).backward()
            optimizer.step()
    for state in workers.run(len(lengths), train_counting, lengths):
        assert difference(state, [tensor.detach() for tensor in module.state_dict().values()]) < 1e-10
