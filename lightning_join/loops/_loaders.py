"""What every rank knows of its dataloaders, decided on all ranks from the same numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_join._compat import parse_num_batches, sized_len
from torch_join import Channel, JoinValueError, name_ranks


class DataloaderError(JoinValueError, MisconfigurationException):
    """The dataloaders of some rank cannot be run; also the error that Lightning raises for them."""


@dataclass(frozen=True)
class Loaders:
    """One rank's dataloaders.

    Attributes:
        limits: Number of batches to run per dataloader, infinite where nobody knows.
        error: Why they cannot be run, if they cannot.

    """

    limits: list[int | float]
    error: str | None = None


def measure(stage: RunningStage, loaders: Sequence[Any], limit: int | float) -> Loaders:
    """Measure this rank's dataloaders; an error is a result too, since all ranks must hear of it."""
    limits: list[int | float] = []
    for loader in loaders:
        length = sized_len(loader)
        try:
            limits.append(parse_num_batches(stage, float("inf") if length is None else length, limit))
        except MisconfigurationException as error:
            return Loaders(limits, str(error))
    return Loaders(limits)


def exchange(channel: Channel, mine: Loaders) -> list[Loaders]:
    """Share what every rank measured.

    Raises:
        DataloaderError: On all ranks, if the dataloaders of one cannot be run or their numbers differ.

    """
    everyone = channel.gather(mine)
    errors = {rank: loaders.error for rank, loaders in enumerate(everyone) if loaders.error}
    if errors:
        rank, error = next(iter(errors.items()))
        raise DataloaderError(f"The dataloaders of {name_ranks(errors)} cannot be run. Rank {rank}: {error}")
    counts = [len(loaders.limits) for loaders in everyone]
    if len(set(counts)) > 1:
        raise DataloaderError(
            f"Every rank needs the same number of dataloaders, but they have {counts} (by rank). Give a rank"
            " without data an empty dataloader."
        )
    return everyone
