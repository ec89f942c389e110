"""Experts over several ranks, by a `JoinTrainer`; and what is logged, counted and predicted, which is of batches."""

import tempfile
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, SequentialSampler
from transformers import PretrainedConfig, TrainerCallback

from accelerate_join.transformers import JoinTrainer
from tests.support import experts
from tests.support.experts import Batch, Case, Part
from tests.support.front_ends.accelerate import Stream, accelerator_of
from tests.support.front_ends.transformers import Fit, arguments_of


def named(batch: Batch) -> dict[str, Tensor]:
    return dict(zip(("x", "labels"), batch, strict=True))


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return named(experts.masked((batch["x"], batch["labels"])))


class Batches(Dataset[Any]):
    """A rank's own."""

    def __init__(self, case: Case, rank: int) -> None:
        self._batches = [*map(named, case.batches(rank))]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._batches[index]


class Model(nn.Module):
    """Experts over some ranks, as a model of transformers."""

    accepts_loss_kwargs, main_input_name = False, "x"

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.part, self.case, self.config = Part(case), case, PretrainedConfig()
        self.net = self.part.net
        self.part.hide(self, "net.")

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": experts.loss_of(self.case, out, labels, self.net), "logits": out}


class Averaging(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        getattr(model, "module", model).part.before_step()


class Trainer(JoinTrainer):
    own_shards = True
    ran: list[int]  # by step, on how many rows

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self.ran.append(len(inputs["x"]))
            rows = self.accelerator.gather(torch.tensor(len(inputs["x"])))
            total = self.accelerator.reduce(torch.tensor(float(len(inputs["x"]))), "sum")
            self.log({"rows": rows.tolist(), "total": float(total)})
        return super().compute_loss(model, inputs, *args, **kwargs)


def transformers(rank: int, case: Case, streams: bool) -> tuple[int, list[Tensor], Any, Any]:
    """Return also what was logged, and what is predicted for this rank's samples."""
    extra = {"max_grad_norm": 0.0, "logging_strategy": "steps", "include_num_input_tokens_seen": "all"}
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        model, data = Model(case), Batches(case, rank)
        optimizer = experts.make_optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        steps = {"max_steps": max(case.lengths) // case.window} if streams else {}
        fit = Fit(case.lengths, 1, batch_size=1, accumulate=case.window)
        trainer = Trainer(
            model=model,
            args=arguments_of(fit, folder, **extra, **steps),
            train_dataset=Stream(data, len(data)) if streams else data,
            data_collator=itemgetter(0),
            callbacks=[Averaging()],
            optimizers=(optimizer, schedule),
            weighting=case.weighting,
            placeholder=masked if case.placeholder is experts.masked else case.placeholder,
        )
        trainer.ran = []
        trainer.train()
        at_end = trainer.ran[case.lengths[rank] :]
        assert all((rows > 0) == (case.placeholder != "rows") for rows in at_end)
        predicted = trainer.predict(data)
        logs = [*trainer.state.log_history, trainer.state.num_input_tokens_seen]
        outputs = predicted.predictions, predicted.metrics["test_loss"]
        return model.part.place, model.part.parameters, logs, outputs


def check(case: Case, ranks: Any) -> None:
    experts.check(case, [each[:2] for each in ranks])
    rows = case.rows()
    logs, tokens = ranks[0][2][:-1], ranks[0][2][-1]
    assert [log["rows"] for log in logs if "rows" in log] == rows
    assert [log["total"] for log in logs if "total" in log] == [*map(sum, rows)]
    assert tokens == sum(map(sum, rows)) * experts.TOKENS * experts.WIDTH
    net = experts.alone(case)
    batches = [case.batch(rank, step) for rank, length in enumerate(case.lengths) for step in range(length)]
    with torch.no_grad():
        outputs = [net(x) for x, _ in batches]
    for *_, (predictions, loss) in ranks:
        assert torch.tensor(predictions).sub(torch.cat(outputs)).abs().max() < 1e-8
        if not case.balance:
            mean = cross_entropy(torch.cat(outputs).flatten(0, 1), torch.cat([y for _, y in batches]).flatten())
            assert loss == pytest.approx(mean.item(), abs=1e-6)
