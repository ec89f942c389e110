"""A finished rank runs Trainer's step itself: experts are those of one process, and what is logged is of batches."""

import random
import tempfile
from operator import itemgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, SequentialSampler
from transformers import PretrainedConfig, TrainerCallback

from accelerate_join.transformers import JoinTrainer
from tests.support import experts
from tests.support.experts import Case
from tests.support.front_ends.accelerate import Stream, accelerator_of
from tests.support.front_ends.transformers import Fit, arguments_of
from tests.support.many import seeds
from tests.support.workers import Workers


def emptied(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:0] for name, value in batch.items()}


class Batches(Dataset[Any]):
    """A rank's own."""

    def __init__(self, case: Case, rank: int) -> None:
        self._batches = [{"x": x, "labels": y} for x, y in case.batches(rank)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._batches[index]


class Model(nn.Module):
    """Experts over all ranks, as a model of transformers."""

    accepts_loss_kwargs, main_input_name = False, "x"

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case, self.config = experts.make(dist.group.WORLD, dist.get_rank()), case, PretrainedConfig()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["net.experts.weight"])

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": experts.loss_of(self.case, out, labels, self.net), "logits": out}


class Averaging(TrainerCallback):
    """Gradients of the rest are averaged, and those of experts are added up."""

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        getattr(model, "module", model).net.experts.weight.grad /= dist.get_world_size()


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


def train(rank: int, case: Case, streams: bool) -> tuple[int, list[Tensor], Any, Any]:
    """Return also what was logged, and what is predicted for this rank's samples."""
    extra = {"max_grad_norm": 0.0, "logging_strategy": "steps", "include_num_input_tokens_seen": "all"}
    with accelerator_of(rank), tempfile.TemporaryDirectory() as folder:
        model, data = Model(case), Batches(case, rank)
        optimizer = experts.make_optimizer(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        steps = {"max_steps": max(case.lengths)} if streams else {}
        trainer = Trainer(
            model=model,
            args=arguments_of(Fit(case.lengths, 1, batch_size=1), folder, **extra, **steps),
            train_dataset=Stream(data, len(data)) if streams else data,
            data_collator=itemgetter(0),
            callbacks=[Averaging()],
            optimizers=(optimizer, schedule),
            weighting=case.weighting,
            placeholder=case.placeholder,
        )
        trainer.ran = []
        trainer.train()
        at_end = trainer.ran[case.lengths[rank] :]
        assert all((rows > 0) == (case.placeholder == "last") for rows in at_end)
        predicted = trainer.predict(data)
        found = [p.detach().clone() for p in model.net.parameters()]
        logs = [*trainer.state.log_history, trainer.state.num_input_tokens_seen]
        return rank, found, logs, (predicted.predictions, predicted.metrics["test_loss"])


def check(case: Case, ranks: Any) -> None:
    experts.check(case, [each[:2] for each in ranks])
    steps = [[r for r, n in enumerate(case.lengths) if s < n] for s in range(max(case.lengths))]
    rows = [[len(case.batch(rank, step)[0]) for rank in active] for step, active in enumerate(steps)]
    logs, tokens = ranks[0][2][:-1], ranks[0][2][-1]
    assert [log["rows"] for log in logs if "rows" in log] == rows
    assert [log["total"] for log in logs if "total" in log] == [*map(sum, rows)]
    assert tokens == sum(map(sum, rows)) * experts.TOKENS * experts.WIDTH
    net = experts.reference(case)
    batches = [case.batch(rank, step) for rank, length in enumerate(case.lengths) for step in range(length)]
    with torch.no_grad():
        outputs = [net(x) for x, _ in batches]
    for *_, (predictions, loss) in ranks:
        assert torch.tensor(predictions).sub(torch.cat(outputs)).abs().max() < 1e-10
        if not case.balance:
            mean = cross_entropy(torch.cat(outputs).flatten(0, 1), torch.cat([y for _, y in batches]).flatten())
            assert loss == pytest.approx(mean.item(), abs=1e-6)


CASES = {
    "last": Case((0, 2, 5, 3), weighting="samples", ranks_per_model=4),
    "rows": Case((1, 4), placeholder="rows", weighting="active"),
    "function": Case((4, 0), placeholder=emptied, balance=False),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_are_those_of_one_process(workers: Workers, name: str) -> None:
    case = CASES[name]
    check(case, workers.run(len(case.lengths), train, case, name == "rows", deadline=60.0))


@pytest.mark.long
@seeds(range(0), 60)
def test_any_experts(workers: Workers, seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice((2, 4))
    lengths = *(rng.randint(0, 4) for _ in range(world - 1)), rng.randint(1, 4)
    placeholder, weighting = rng.choice(("rows", "last", emptied)), rng.choice(("world", "active", "samples"))
    case = Case(lengths, "ddp", world, weighting, placeholder, rng.random() < 0.5)
    check(case, workers.run(world, train, case, rng.random() < 0.3, deadline=60.0))
