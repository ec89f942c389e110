"""Objects of `pytorch_lightning` meet ours, and the other way round: errors name what to import."""

import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors import callback_connector
from torch.utils.data import DataLoader

import lightning_join
from lightning_join import DDPJoinStrategy, JoinCallback, JoinMonitor
from tests.support.front_ends import lightning as front_end
from tests.support.front_ends.lightning import Fit, Module, build_trainer
from tests.support.workers import Workers
from torch_join import JoinTypeError

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 1,
}


def texts(rank: int) -> dict[str, str]:
    """What is said, by case; the other package stays in this worker."""
    import pytorch_lightning as other

    class OtherModule(other.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]

    class OtherCallback(other.Callback):  # type: ignore[misc]
        pass

    class OtherData(other.LightningDataModule):  # type: ignore[misc]
        pass

    case = Fit((2,))

    def ours(strategy: str = "ddp_join", *callbacks: Any, **data: Any) -> None:
        build_trainer(case, strategy=strategy, callbacks=list(callbacks)).fit(Module(case), **data)

    attempts: dict[str, Callable[[], Any]] = {
        "their trainer, our strategy": lambda: other.Trainer(strategy=DDPJoinStrategy(), **QUIET),
        "their trainer, our name": lambda: other.Trainer(strategy="ddp_join", **QUIET),
        "their trainer, JoinCallback": lambda: other.Trainer(strategy="ddp", callbacks=[JoinCallback()], **QUIET).fit(
            OtherModule()
        ),
        "their trainer, JoinMonitor": lambda: other.Trainer(callbacks=[JoinMonitor()], **QUIET).fit(OtherModule()),
        "our trainer, their callback": lambda: ours("ddp_join", other.callbacks.EarlyStopping("loss")),
        "our trainer, a user's callback": lambda: ours("ddp", JoinCallback(), OtherCallback()),
        "our trainer, their data": lambda: ours(datamodule=OtherData()),
        "our trainer, their module": lambda: build_trainer(case).fit(OtherModule()),
        "our trainer, their own module": lambda: build_trainer(case).fit(other.LightningModule()),
    }
    said = {}
    for name, run in attempts.items():
        try:
            run()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


# Older trainers refuse any callback of another package before anybody is asked; so for some this is all there is.
TRAINERS_REFUSE = "parent=" not in inspect.getsource(callback_connector._validate_callbacks_list)
REMEDY = "Import Trainer, LightningModule, callbacks and the rest from `lightning.pytorch`; or all of them from"
EXPECTED = {
    "their trainer, our strategy": "DDPJoinStrategy, for the Trainer of `from lightning.pytorch import Trainer`",
    # There nothing of ours is asked: this is all that can be had.
    "their trainer, our name": "an instance of `pytorch_lightning.strategies.Strategy`",
    "their trainer, JoinCallback": "lightning_join.JoinCallback, which is for `lightning.pytorch`, was passed to a"
    f" Trainer of `pytorch_lightning`. {REMEDY}",
    "their trainer, JoinMonitor": "JoinTypeError: lightning_join.JoinMonitor, which is for `lightning.pytorch`, was",
    "our trainer, their callback": "JoinTypeError: EarlyStopping is a EarlyStopping of `pytorch_lightning`, but",
    "our trainer, a user's callback": REMEDY,
    "our trainer, their data": "JoinTypeError: OtherData is a LightningDataModule of `pytorch_lightning`, but",
    "our trainer, their module": "TypeError: `model` must be a `LightningModule`",
    "our trainer, their own module": "You passed a `pytorch_lightning` object (LightningModule) to a"
    " `lightning.pytorch` Trainer.",
}


if TRAINERS_REFUSE:
    for case in ("their trainer, JoinCallback", "their trainer, JoinMonitor", "our trainer, a user's callback"):
        EXPECTED[case] = "ValueError: Expected a parent"
    EXPECTED["our trainer, their callback"] = "You passed a `pytorch_lightning` object (EarlyStopping)"


def test_errors_name_what_to_import(workers: Workers) -> None:
    (said,) = workers.run(1, texts)
    for name, text in EXPECTED.items():
        if name == "their trainer, our name" and name not in said:
            continue  # another test has imported `pytorch_lightning_join` in that process
        assert text in said.get(name, ""), name


def twin_of(module: Any) -> dict[str, Any]:
    """Run a module of ours with `pytorch_lightning` in place of `lightning.pytorch`."""
    source = Path(module.__file__).read_text().replace("lightning_join", "pytorch_lightning_join")
    twin = types.ModuleType(f"{module.__name__}_twin")
    sys.modules[twin.__name__] = twin
    exec(compile(source.replace("lightning.pytorch", "pytorch_lightning"), module.__file__, "exec"), vars(twin))
    return vars(twin)


def fit_twin(rank: int, lengths: tuple[int, ...], callback: bool) -> front_end.Result:
    import pytorch_lightning_join as twins

    twin = types.SimpleNamespace(**twin_of(front_end))
    case = twin.Fit(lengths)
    text = (
        "Expected a parent" if TRAINERS_REFUSE else "`import lightning_join` instead of `import pytorch_lightning_join`"
    )
    with pytest.raises(ValueError if TRAINERS_REFUSE else JoinTypeError, match=text):
        twin.build_trainer(case, callbacks=[JoinCallback()]).fit(twin.Module(case))
    options = {"strategy": "ddp", "callbacks": [twins.JoinCallback(), twins.JoinMonitor()]} if callback else {}
    module, trainer = twin.Module(case), twin.build_trainer(case, **(options or {"strategy": "ddp_join"}))
    trainer.fit(module)
    return front_end.Result(**vars(twin.result_of(trainer, module)))


@pytest.mark.parametrize("lengths", [(0, 3), (2, 5), (4, 1, 3)])
@pytest.mark.parametrize("callback", [False, True], ids=["strategy", "callback"])
def test_the_twin_trains_exactly(workers: Workers, lengths: tuple[int, ...], callback: bool) -> None:
    front_end.assert_exact(Fit(lengths), workers.run(len(lengths), fit_twin, lengths, callback))


class Foreign:
    __module__ = "pytorch_lightning.trainer.trainer"


def test_a_trainer_of_another_package_is_told_by_its_class() -> None:
    for callback in (JoinCallback(), JoinMonitor()):
        with pytest.raises(JoinTypeError, match="passed to a Trainer of `pytorch_lightning`"):
            callback.setup(Foreign(), Module(Fit((1,))), "fit")  # type: ignore[arg-type]
    assert "pytorch_lightning" not in vars(lightning_join)


def test_every_name_of_lightning_has_a_twin() -> None:
    """A module is told apart by `lightning.pytorch` and `lightning.fabric`, which are put into the other's names."""
    folder = Path(str(lightning_join.__file__)).parent
    texts = {path.name: re.sub(r"lightning\.(pytorch|fabric)\b", "", path.read_text()) for path in folder.rglob("*.py")}
    assert [name for name, text in texts.items() if re.search(r"[\"'`]lightning\b", text)] == []
