"""A `Run` by a `JoinTrainer`; a `Fit`, which a plain `Trainer` can do in one process on the unions of the batches."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, SequentialSampler
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from accelerate_join.transformers import JoinTrainer
from tests.support.front_ends.accelerate import Stream, accelerator_of
from tests.support.run import Run

TOKENS, KINDS = 4, 5
FROM_5 = transformers.__version__ >= "5"
if not FROM_5:  # which loads an optimizer to "cpu:0", of which torch knows nothing
    torch.serialization.register_package(
        0, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None
    )
# Where it smoothes labels, transformers 4 adds up the means of the ranks.
SMOOTHING = 0.1 if FROM_5 else 0.0
LOSS_TOLERANCE = 1e-6 if FROM_5 else 1e-4  # in float32, and rounded by transformers 4


@dataclass(frozen=True)
class Fit(Run):
    """A run of a model that predicts tokens.

    Attributes:
        lengths: By rank, its number of batches in a dataset of its own; empty where Trainer shards one.
        weighting: Also a function.
        samples: In that one.
        counts: Whether the model divides by the number of items in all ranks' batches.
        norm: What its inputs go through.
        extra: What else `TrainingArguments` takes.
    """

    epochs: int = 2
    weighting: Any = "world"
    samples: int = 0
    processes: int = 2  # where there are no lengths
    batch_size: int = 2
    counts: bool = True
    norm: type[nn.Module] = nn.Identity

    @property
    def world_size(self) -> int:
        return len(self.lengths) or self.processes


class Net(nn.Module):
    """Predicts some tokens from a vector."""

    def __init__(self, counts: bool, norm: type[nn.Module] = nn.Identity, overflows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.accepts_loss_kwargs = counts
        self.overflows = overflows
        self.config = PretrainedConfig()
        self.norm = norm(3)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, TOKENS * KINDS))
        self.double()

    def forward(
        self, x: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.layers(self.norm(x)).unflatten(1, (TOKENS, KINDS))
        if labels is None:
            return {"logits": logits}
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        if num_items_in_batch is not None:
            loss = losses.sum() / num_items_in_batch
        else:
            rows = losses.view_as(labels).sum(1) / (labels != -100).sum(1)
            loss = rows.mean() if weight is None else (rows * weight).sum()
        if self.overflows and bool((x[:, 0] > 1).any()):
            loss = loss * torch.inf
        return {"loss": loss, "logits": logits}


def sample(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    labels = torch.randint(KINDS, (TOKENS,), generator=generator)
    labels[1 + number % TOKENS :] = -100
    return {"x": torch.randn(3, generator=generator, dtype=torch.float64), "labels": labels}


class Samples(Dataset[Any]):
    def __init__(self, first: int, number: int) -> None:
        self.numbers = range(first, first + number)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(self.numbers[index])


def data_of(fit: Fit, rank: int) -> Any:
    """Return this rank's own, whose last batch is not full, or that of all."""
    if not fit.lengths:
        return Samples(0, fit.samples)
    data = Samples(1000 * rank, max(0, fit.batch_size * fit.lengths[rank] - rank % 2))
    return Stream(data, len(data)) if fit.iterable else data


class SumsInFloat64(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.sum and args[0].dtype is torch.float64:
            kwargs.pop("dtype", None)
        return function(*args, **kwargs)


def exact(fit: Fit) -> AbstractContextManager[Any]:
    """Put around a fit in float64.

    Trainer smoothes labels by a sum in float32, in which it rounds the gradient. Ranks round theirs, that of one
    process times their number, elsewhere, unless that is a power of two.
    """
    return SumsInFloat64() if fit.extra.get("label_smoothing_factor") else nullcontext()


class EpochCounter(TrainerCallback):
    def __init__(self, seen: list[list[Any]]) -> None:
        self.seen = seen

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append([])


class Scaling(Trainer):
    """Scales its loss, if its model overflows; `fp16` would, on accelerators only."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.overflows:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return super().create_optimizer(*args, **kwargs)


class Recording(JoinTrainer, Scaling):
    """Keeps what it has trained on, by epoch."""

    seen: list[list[dict[str, Tensor]]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training and not self.joined:
            self.seen[-1].append({name: inputs[name].clone() for name in ("x", "labels")})
        return super().compute_loss(model, inputs, *args, **kwargs)


@dataclass
class Trained:
    """What a rank has in the end."""

    parameters: list[Tensor]
    seen: list[list[dict[str, Tensor]]]
    logs: list[dict[str, Any]]
    steps: int
    buffers: list[Tensor]
    scaler: Any


def arguments_of(fit: Fit, folder: str, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": fit.batch_size,
        "per_device_eval_batch_size": fit.batch_size,
        "num_train_epochs": fit.epochs,
        "gradient_accumulation_steps": fit.accumulate,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": True,
    }
    return TrainingArguments(output_dir=folder, **{**options, **fit.extra, **more})


def outcome(trainer: Any, seen: Any = ()) -> Trained:
    parameters = [p.detach().clone() for p in trainer.model.parameters()]
    buffers, scaler = [b.clone() for b in trainer.model.buffers()], trainer.accelerator.scaler
    state = trainer.state
    return Trained(
        parameters, list(seen), state.log_history, state.global_step, buffers, scaler and scaler.state_dict()
    )


def train(rank: int, fit: Fit, kind: type[Recording] = Recording, **options: Any) -> Trained:
    # A daemon, as these workers are, may have no processes of its own, and a loader may.
    daemon = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder, exact(fit), daemon:
        seen: list[list[Any]] = []
        kind.seen = seen
        trainer = kind(
            model=Net(fit.counts, fit.norm, bool(fit.scaler)),
            args=arguments_of(fit, folder),
            train_dataset=data_of(fit, rank),
            callbacks=[EpochCounter(seen)],
            weighting=fit.weighting,
            own_shards=bool(fit.lengths),
            rebalance=fit.rebalance,
            **options,
        )
        trainer.train()
        return outcome(trainer, seen)


class Unions:
    """A loader of given batches, in one epoch after the other."""

    def __init__(self, epochs: list[list[Any]], has_length: bool) -> None:
        self.epochs, self.has_length, self.begun = epochs, has_length, 0

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter(self.epochs[self.begun - 1])


def count_labels(batch: Any) -> float:
    return float((batch["labels"] != -100).sum())


def shares(fit: Fit, each: Any, step: int) -> list[Tensor]:
    """Return how much the mean of each rank's batch counts in a step."""
    parts = [batches[step] for batches in each if step < len(batches)]
    if callable(fit.weighting):
        first = step - step % fit.accumulate
        window = [batch for batches in each for batch in batches[first : first + fit.accumulate]]
        steps = max(len(batches[first : first + fit.accumulate]) for batches in each)  # by which Trainer divides
        total = sum(map(fit.weighting, window))
        found = [steps * fit.weighting(part) / total for part in parts]
    elif fit.weighting == "samples":
        found = [len(part["x"]) / sum(len(part["x"]) for part in parts) for part in parts]
    else:
        found = [1 / (len(each) if fit.weighting == "world" else len(parts))] * len(parts)
    return [torch.tensor([share], dtype=torch.float64) for share in found]


def unions(fit: Fit, found: list[Trained]) -> list[list[dict[str, Tensor]]]:
    """Return, by epoch and step, what all ranks have trained on, with the weights that the fit gives to rows."""
    epochs = []
    for each in zip(*(trained.seen for trained in found), strict=True):
        epochs.append([])
        for step in range(max(map(len, each))):
            parts = [batches[step] for batches in each if step < len(batches)]
            rows = [len(part["x"]) for part in parts]
            batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            if not fit.counts:
                weights = [share / own for share, own in zip(shares(fit, each, step), rows, strict=True)]
                batch["weight"] = torch.cat([w.expand(n) for w, n in zip(weights, rows, strict=True)])
            epochs[-1].append(batch)
    return epochs


def by_trainer(fit: Fit, found: list[Trained], **more: Any) -> Trained:
    """Train in one process on the unions of what the ranks have trained on."""
    epochs = unions(fit, found)

    class Reference(Scaling):
        def get_train_dataloader(self) -> Any:
            return Unions(epochs, not fit.iterable)

    with accelerator_of(0), tempfile.TemporaryDirectory() as folder, exact(fit):
        trainer = Reference(model=Net(fit.counts, fit.norm, bool(fit.scaler)), args=arguments_of(fit, folder, **more))
        trainer.train()
        return outcome(trainer)


def in_one_process(fit: Fit, found: list[Trained]) -> Trained:
    """Train by a `JoinTrainer` in one process on the unions, in which a batch counts in it what it does on its rank."""
    epochs = unions(replace(fit, counts=True), found)
    if not fit.counts:
        for each, batches in zip(zip(*(trained.seen for trained in found), strict=True), epochs, strict=True):
            for step, batch in enumerate(batches):
                parts = [seen[step] for seen in each if step < len(seen)]
                counts = [fit.weighting(part) / len(part["x"]) for part in parts]
                rows = [torch.full((len(part["x"]),), n) for part, n in zip(parts, counts, strict=True)]
                batch["weight"] = torch.cat(rows).double() / fit.weighting(batch)

    class OnUnions(JoinTrainer):
        def get_train_dataloader(self) -> Any:
            return Unions(epochs, not fit.iterable)

    with accelerator_of(0), tempfile.TemporaryDirectory() as folder:
        trainer = OnUnions(model=Net(fit.counts), args=arguments_of(fit, folder), weighting=fit.weighting)
        trainer.train()
        return outcome(trainer)


class _Model(nn.Module):
    """What a run trains, as a model of transformers."""

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self.run, self.rank, self.net, self.config = run, rank, run.build(), PretrainedConfig()
        self.accepts_loss_kwargs = False

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        (loss,) = self.run.losses(self.net, (x, y), self.rank, 0, 0)
        return {"loss": loss}


class _InOrder(JoinTrainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class _Own(Dataset[Any], TrainerCallback):
    """A rank's own batches, of the epoch that has begun."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.epoch = run, rank, -1

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.epoch += 1

    def __len__(self) -> int:
        return self.run.lengths_in(0)[self.rank]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip("xy", self.run.batch(self.rank, self.epoch, index), strict=True))


def parameters(rank: int, run: Run) -> list[Tensor]:
    """Do a run on one rank; return the parameters."""
    fit = Fit(
        run.lengths, run.epochs, batch_size=1, accumulate=run.accumulate, extra={"max_grad_norm": run.clip or 0.0}
    )
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        model, data = _Model(run, rank), _Own(run, rank)
        optimizer = run.make_optimizer(model.parameters())
        scheduler = run.make_scheduler(optimizer) or torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        _InOrder(
            model=model,
            args=arguments_of(fit, folder),
            train_dataset=data,
            data_collator=itemgetter(0),
            callbacks=[data],
            optimizers=(optimizer, scheduler),
            weighting=run.option,
            own_shards=True,
            rebalance=run.rebalance,
            placeholder=run.placeholder,
        ).train()
        return [p.detach().clone() for p in model.parameters()]
