"""An evaluation loop in which ranks may have different numbers of batches, of different sizes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn

from accelerate_join import _compat_transformers as _compat
from torch_join import JoinValueError
from torch_join.integration import Channel, ReadStep, StepDriver, broadcast


class Evaluation:
    """One evaluation loop. A rank without a batch follows the active ranks' collectives, and has empty outputs.

    Args:
        driver: The driver of the steps.
        trainer: The trainer.

    Attributes:
        rows: The number of this rank's samples in each step.
        gathers_objects: Whether outputs are gathered as objects: lists with an entry for each sample.
    """

    def __init__(self, driver: StepDriver, trainer: Any) -> None:
        self._driver, self._device = driver, trainer.args.device
        self._averages = trainer.args.average_tokens_across_devices  # whether losses are divided by all ranks' items
        self.gathers_objects = bool(trainer.args.eval_use_gather_object)
        self._gather_tensors = trainer.accelerator.gather_for_metrics
        self._joined = False
        self._world_size = driver.members.world_size
        self._loss_rows: int | None = None  # of the step whose loss is gathered next
        self._kinds: Any = None  # the outputs of a step, without rows
        self._divides = False  # whether losses are divided by the items of all ranks
        self.rows: list[int] = []

    def note_division(self, num_items: Any) -> None:
        """Record that a loss is computed, and whether it is divided by a number of items."""
        self._divides = self._averages and num_items is not None

    def step(
        self,
        step: ReadStep,
        own: Callable[..., tuple[Any, Any, Any]],
        model: nn.Module,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Run `Trainer.prediction_step`: return loss, logits and labels, which have no rows on a joined rank."""
        rank, active = self._driver.members.rank, step.active_ranks
        self._joined = joined = rank not in active
        rows = 0 if joined else _compat.rows_of(inputs) or 1
        self.rows.append(rows)
        outputs: Any = None
        runs_placeholders, divides = self._driver.options.placeholder is not None, self._divides
        if joined and not runs_placeholders:
            self._driver.follow(active)
        else:
            with nullcontext() if runs_placeholders else self._driver.step(active):
                outputs = own(model, inputs, *args, **kwargs)
        self._divides = divides if joined else self._divides
        if not joined and outputs[0] is not None and outputs[0].ndim:  # one loss per sample
            outputs, self._divides = (outputs[0].mean(), *outputs[1:]), False
        if len(active) < self._world_size:
            if self._kinds is None:
                kinds = (recursively_apply(_without_rows, outputs), self._divides) if rank == active[0] else None
                self._kinds, self._divides = broadcast(kinds, active[0], self._device)
            if joined:
                outputs = recursively_apply(lambda tensor: tensor.to(self._device), self._kinds)
        loss, logits, labels = outputs
        self._loss_rows = None if loss is None else rows
        return loss, logits, labels

    def gather(self, own: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather `data`. Trainer repeats a loss for each row of a full batch; this repeats it for each row of this one.

        If the loss is divided by the items of all ranks and multiplied by the number of ranks, the sum of the ranks'
        shares is the loss of all their rows.
        """
        rows, self._loss_rows = self._loss_rows, None
        if rows is None:
            if self.gathers_objects and self._joined and isinstance(data, (list, tuple)):
                data = data[:0]  # each object in it would count as a sample
            return own(data, *args, **kwargs)
        if self.gathers_objects:
            own = self._gather_tensors  # losses are always tensors
        if not self._divides:
            return own(data[:1].repeat(rows), *args, **kwargs)
        gathered = own((data[:1] / (self._world_size * max(1, rows))).repeat(rows), *args, **kwargs)
        return gathered * len(gathered)


def in_one_order(channel: Channel, datasets: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation datasets in rank 0's order; all ranks call this.

    Raises:
        JoinValueError: The names differ between ranks.
    """
    all_names = channel.gather([*map(str, datasets)], of=list[str])
    if any({*names} != {*all_names[0]} for names in all_names):
        by_rank = "; ".join(f"rank {rank}: {', '.join(sorted(names))}" for rank, names in enumerate(all_names))
        raise JoinValueError(
            f"The names of the evaluation datasets differ between ranks ({by_rank}), but all ranks evaluate each"
            " dataset together. Use the same names on all ranks, with an empty dataset on a rank without samples."
        )
    by_name = {str(name): (name, dataset) for name, dataset in datasets.items()}
    return dict(by_name[name] for name in all_names[0])


def by_rank(outputs: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Sort by rank the outputs that were gathered step by step.

    Args:
        outputs: Arrays with a row per sample, in any structure; other values stay unchanged.
        rows: The number of rows of each rank in each step.
    """
    places = [(rank, row) for step in zip(*rows, strict=True) for rank, n in enumerate(step) for row in range(n)]
    order = sorted(range(len(places)), key=lambda place: places[place][0])  # stable: a rank's rows stay in order

    def reordered(values: Any) -> Any:
        return values[order] if values.ndim and len(values) == len(order) else values

    return recursively_apply(reordered, outputs, test_type=lambda value: isinstance(value, np.ndarray))


def _without_rows(tensor: Tensor) -> Tensor:
    return (tensor[:0] if tensor.ndim else tensor).detach().cpu().clone()
