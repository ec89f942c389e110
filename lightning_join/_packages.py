"""Objects of `pytorch_lightning`, whose classes differ from those of `lightning.pytorch`.

Nothing here imports that package: its objects are recognized by the names of their modules.
"""

import lightning.pytorch as pl

from torch_join import JoinTypeError

_OTHER = "pytorch_lightning"
_REMEDY = (
    "Import Trainer, LightningModule, callbacks and the rest from `lightning.pytorch`; or all of them from"
    " `pytorch_lightning`, with `import pytorch_lightning_join` instead of `import lightning_join`."
)


def check_packages(trainer: "pl.Trainer") -> None:
    """Raise if a callback or the datamodule of `trainer` comes from `pytorch_lightning`.

    Lightning's trainer rejects a module from that package itself, before it has a strategy. But it accepts callbacks by
    the names of their hooks, so Lightning's own `isinstance` checks would miss them.

    Raises:
        JoinTypeError: With the import to use.
    """
    for part in (*trainer.callbacks, trainer.datamodule):  # type: ignore[attr-defined]
        if isinstance(part, (pl.Callback, pl.LightningDataModule)):
            continue
        for base in type(part).__mro__:
            if base.__module__.startswith(f"{_OTHER}."):
                raise JoinTypeError(
                    f"{type(part).__name__} is a {base.__name__} of `{_OTHER}`, but the Trainer and lightning_join"
                    f" are of `lightning.pytorch`, which does not accept classes of the other package. {_REMEDY}"
                )


def check_trainer(trainer: object, callback: pl.Callback) -> None:
    """Raise if one of this package's callbacks runs in a trainer that is not from `lightning.pytorch`.

    Raises:
        JoinTypeError: With the import to use.
    """
    if not isinstance(trainer, pl.Trainer):
        raise JoinTypeError(
            f"lightning_join.{type(callback).__name__}, which is for `lightning.pytorch`, was passed to a Trainer of"
            f" `{type(trainer).__module__.partition('.trainer')[0]}`. {_REMEDY}"
        )
