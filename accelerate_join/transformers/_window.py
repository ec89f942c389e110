"""How a Trainer's losses are weighted in one optimizer step, which may have several micro-batches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_join import JoinValueError, UnsupportedError
from torch_join.integration import ReadStep, factor_of_count


class Window:
    """The weights of the current optimizer step.

    Args:
        trainer: The trainer.
        world_size: The number of ranks.
    """

    def __init__(self, trainer: Any, world_size: int) -> None:
        self._trainer, self._world_size = trainer, world_size
        self._ranks: set[int] = set()  # those with a batch in it
        self._total = 0.0  # the sum of all ranks' counts

    def begin(self, steps: Sequence[ReadStep], num_items: Any) -> Any:
        """Start an optimizer step.

        Args:
            steps: The steps of its micro-batches.
            num_items: The number of items by which Trainer would divide its loss; `None` if it does not.

        Returns:
            The number by which Trainer divides it.

        Raises:
            JoinValueError: That number is zero.
            UnsupportedError: Each rank would divide by a different number.
        """
        self._ranks = {rank for step in steps for rank in step.active_ranks}
        if not callable(self._trainer.weighting):
            return num_items
        self._total = math.fsum(step.total for step in steps)
        if num_items is None:
            return None
        if not self._trainer.args.average_tokens_across_devices:
            raise UnsupportedError(
                "A weighting function cannot be combined with average_tokens_across_devices=False, which divides the"
                " loss by each rank's own number of items. Remove one of them."
            )
        if not self._total:
            raise JoinValueError(
                "`weighting` returned 0 for all batches of a step, and Trainer would divide their loss by 0. Remove"
                " such batches from the dataloader."
            )
        return torch.as_tensor(self._total, device=self._trainer.args.device)

    def factors(self, step: ReadStep, num_items: Any) -> tuple[float, float]:
        """Return two factors of a rank's loss: for backward, and for showing the mean of all ranks."""
        trainer, weighting, world_size = self._trainer, self._trainer.weighting, self._world_size
        if num_items is not None:
            if weighting in ("active", "samples"):
                raise UnsupportedError(
                    f"weighting={weighting!r} cannot be used: {type(trainer).__name__} already divides the loss by"
                    " the number of items in all ranks' batches (num_items_in_batch). Use weighting='world', or a"
                    " function that counts items in place of Trainer. If your compute_loss does not divide, set"
                    " model_accepts_loss_kwargs = False on the trainer."
                )
            # Without averaging, a rank divides by the items of its own micro-batches, and a window has one loss.
            averages = trainer.args.average_tokens_across_devices
            return 1.0, 1.0 if averages else world_size / len(self._ranks or step.active_ranks)
        if callable(weighting):
            # Replaces Trainer's division by the number of micro-batches.
            factor = trainer.current_gradient_accumulation_steps * factor_of_count(
                world_size, step.counted, self._total
            )
            return factor, factor
        if weighting == "samples":
            factor = factor_of_count(world_size, step.counted, step.total)
            return factor, factor
        shown = world_size / len(step.active_ranks)
        return (shown if weighting == "active" else 1.0), shown


def shown_loss(loss: Tensor, factor: float) -> Tensor:
    """Return the loss for the sum that Trainer gathers from all ranks, which needs the same dtype on each."""
    loss = loss.float() if loss.dtype == torch.float64 else loss
    return loss if factor == 1.0 else loss * factor
