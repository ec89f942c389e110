"""Objects of `pytorch_lightning`, whose classes are others than those of `lightning.pytorch`.

Nothing here imports that package: its objects are recognized by the names of their modules.
"""

import lightning.pytorch as pl

from torch_join import JoinTypeError

_OTHER = "pytorch_lightning"


def check_packages(trainer: "pl.Trainer") -> None:
    """Raise if a callback or the datamodule of `trainer` comes from `pytorch_lightning`.

    Its trainer refuses such a module itself, and before there is a strategy to ask. Callbacks it takes
    by the names of their hooks, so that each `isinstance` of Lightning's own would miss them.

    Raises:
        JoinTypeError: Naming what to import.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check(callback, pl.Callback, "lightning.pytorch.callbacks")
    _check(trainer.datamodule, pl.LightningDataModule, "lightning.pytorch")  # type: ignore[attr-defined]


def check_trainer(trainer: object, callback: pl.Callback) -> None:
    """Raise if `callback`, one of ours, is run by a trainer that is not Lightning's.

    Raises:
        JoinTypeError: Naming what to import.
    """
    if not isinstance(trainer, pl.Trainer):
        raise JoinTypeError(
            f"lightning_join.{type(callback).__name__} was given to a {type(trainer).__module__.partition('.')[0]}"
            f" Trainer. lightning_join works with `lightning.pytorch`, which is another package than {_OTHER}: write"
            " `from lightning.pytorch import Trainer`, and import LightningModule, callbacks and the rest from there."
        )


def _check(part: object, expected: type, package: str) -> None:
    if isinstance(part, expected):
        return
    for base in type(part).__mro__:
        if base.__module__.partition(".")[0] == _OTHER:
            raise JoinTypeError(
                f"{type(part).__name__} is a {base.__name__} of {_OTHER}, while the Trainer and lightning_join are of"
                f" `lightning.pytorch`. The two packages do not know each other's classes: write `from {package}"
                f" import {base.__name__}`."
            )
