"""What snippets of the pages find: names that a reader has already, on ranks with one and with three batches."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.docs.snippets import Program, fill
from tests.support import inside
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers

Names = dict[str, Any]
FEATURES, CLASSES, SIZE = 4, 3, 2
LENGTHS = (1, 3)  # in batches, by rank

# In a loop over uneven batches, after the forward.
LOOP = """
with Join([ddp, optimizer]) as join:
    for images, labels in join.batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images), labels)
        HERE
        loss.backward()
        optimizer.step()
"""
# The body of a LightningModule, which is then trained.
MODULE = """
class Written(Given):
    HERE


trainer = Trainer(strategy=strategy)
trainer.fit(Written())
"""
TEMPLATES = {"loop": LOOP, "module": MODULE}


class Shard(Dataset[Any]):
    """This rank's samples: an image, its label, and more under names that snippets use."""

    def __init__(self, rank: int, batches: int | None = None) -> None:
        self.length = SIZE * (LENGTHS[rank] if batches is None else batches)
        generator = torch.Generator().manual_seed(rank)
        self.images = torch.randn(self.length, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (self.length,), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


class Rows(Shard):
    """The same, as dictionaries that know their number in the whole dataset."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.first = SIZE * sum(LENGTHS[:rank])

    def __getitem__(self, index: int) -> Any:
        number = self.first + index
        return {"x": self.images[index], "y": self.labels[index], "index": number, "names": f"sample {number}"}


class Tokens(Dataset[Any]):
    """Sentences of tokens, some of which do not count."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.input_ids = torch.randint(CLASSES, (SIZE * LENGTHS[rank], 5), generator=generator)
        self.labels = self.input_ids.clone()
        self.labels[:, 3 + rank :] = -100

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class Stream(IterableDataset[Any]):
    """A shard without a length."""

    def __init__(self, shard: Dataset[Any]) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return (self.shard[index] for index in range(len(self.shard)))  # type: ignore[arg-type]


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES))


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def base(rank: int) -> Names:
    """What there is in each page."""
    torch.manual_seed(3)
    return {
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "rank": rank,
        "epochs": 2,
        "path": "checkpoint.pt",
        "device": "cpu",
        "nullcontext": contextlib.nullcontext,
        "cross_entropy": cross_entropy,
        "DataLoader": DataLoader,
        "my_shard": lambda rank=rank: Shard(rank),
        "my_stream": lambda rank=rank: Stream(Shard(rank)),
        "net": nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
        "dataset": TensorDataset(torch.randn(7, FEATURES), torch.randint(CLASSES, (7,))),
        "loss_sum": loss_sum,
    }


@contextmanager
def plain(rank: int) -> Iterator[Names]:
    """For loops of one's own: a model in DDP, and what trains it."""
    from torch_join import Join, windows

    names = base(rank)
    ddp = DistributedDataParallel(names["net"])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    yield names | {
        "Join": Join,
        "windows": windows,
        "ddp": ddp,
        "model": ddp,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
        "loader": DataLoader(Shard(rank), SIZE),
        "validation_loader": DataLoader(Shard(rank, 1 + rank), SIZE),
        "test_loader": DataLoader(Rows(rank), SIZE),
        "correct": torch.zeros(()),
        "prefetcher": lambda batches: iter([*batches]),
    }


@contextmanager
def resuming(rank: int) -> Iterator[Names]:
    """The same, with a checkpoint that another job has written."""
    with plain(rank) as names:
        with names["Join"]([names["ddp"]]) as join:
            for step, (images, _) in enumerate(join.batches(names["loader"])):
                names["ddp"](images).sum().backward()
                if step == 0:
                    states = {"model": names["ddp"].module.state_dict(), "optimizer": names["optimizer"].state_dict()}
                    saved = {**states, "join": join.state_dict(), "epoch": 0}
        if rank == 1:
            torch.save(saved, names["path"])
        dist.barrier()
        yield names


@contextmanager
def accuracy(rank: int) -> Iterator[Names]:
    """The same, with a metric."""
    from torchmetrics.classification import MulticlassAccuracy

    with plain(rank) as names:
        yield names | {"accuracy": MulticlassAccuracy(CLASSES)}


@contextmanager
def tokens(rank: int) -> Iterator[Names]:
    """For loops over sentences."""
    with plain(rank) as names:
        model = DistributedDataParallel(language_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = DataLoader(Tokens(rank), SIZE)
        yield names | {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


@contextmanager
def engine(rank: int) -> Iterator[Names]:
    """For DeepSpeed's engines."""
    from tests.support.front_ends.deepspeed import Recipe, config_of, deepspeed_of

    with deepspeed_of(rank) as deepspeed:
        names = base(rank)
        optimizer = torch.optim.AdamW(names["net"].parameters(), lr=0.01)
        yield names | {
            "Join": import_module("torch_join").Join,
            "deepspeed": deepspeed,
            "config": config_of(Recipe()),
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            "loader": DataLoader(Shard(rank), SIZE),
        }


@contextmanager
def sharded(rank: int) -> Iterator[Names]:
    """For models that are to be sharded."""
    from torch_join import Join

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            for block in self.blocks:
                images = torch.tanh(block(images))
            return self.head(images)  # type: ignore[no-any-return]

    names = base(rank)
    yield names | {"Join": Join, "model": Blocks(), "loader": DataLoader(Shard(rank), SIZE)}


@contextmanager
def fsdp(rank: int) -> Iterator[Names]:
    """For a model that is sharded, with its optimizer."""
    from torch.distributed.fsdp import fully_shard

    with sharded(rank) as names:
        model = fully_shard(names["model"])
        yield names | {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


@contextmanager
def lightning(rank: int) -> Iterator[Names]:
    """For Lightning's Trainer, on as many ranks as there are."""
    import lightning.pytorch as pl
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

    import lightning_join

    class Given(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.encoder(images).tanh())  # type: ignore[no-any-return]

        def loss(self, batch: Any) -> Tensor:
            return cross_entropy(self(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return self.loss(batch)

        def on_validation_epoch_start(self) -> None:
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.outputs.append(self(batch[0]))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self) -> Any:
            return DataLoader(Shard(rank), SIZE)

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    make = pl.Trainer.__init__

    def make_here(trainer: Any, **given: Any) -> None:
        make(trainer, **defaults | given | {"devices": dist.get_world_size()})

    with mock.patch.object(pl.Trainer, "__init__", make_here):
        yield base(rank) | {
            "pl": pl,
            "lightning_join": lightning_join,
            "Trainer": pl.Trainer,
            "strategy": "ddp_join",
            "Given": Given,
            "model": Given(),
            "contrastive_loss": lambda z, everyone: (z @ everyone.T).logsumexp(1).mean(),
            "MetricCollection": MetricCollection,
            "MulticlassAccuracy": MulticlassAccuracy,
            "MulticlassPrecision": MulticlassPrecision,
            "MulticlassRecall": MulticlassRecall,
            "loader": DataLoader(Shard(rank), SIZE),
        }


@contextmanager
def windowed(rank: int) -> Iterator[Names]:
    """For a LightningModule whose batches are windows of sentences."""
    from torch_join import windows

    def tokens(batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum()  # type: ignore[no-any-return]

    with lightning(rank) as names:

        class Given(names["pl"].LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = language_model()

            def loss_sum(self, batch: Any) -> Tensor:
                return loss_sum(self.net, batch)

            def train_dataloader(self) -> Any:
                return windows(DataLoader(Tokens(rank), 1), 2)

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters())

        strategy = names["lightning_join"].DDPJoinStrategy(weighting=lambda window: sum(map(tokens, window)))
        yield names | {"Given": Given, "tokens": tokens, "strategy": strategy}


@contextmanager
def gan(rank: int) -> Iterator[Names]:
    """For a LightningModule of two networks."""
    with lightning(rank) as names:

        class Given(names["Given"]):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                del self.encoder, self.head
                self.generator, self.discriminator = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

            def generator_loss(self, batch: Any) -> Tensor:
                return -self.discriminator(self.generator(batch[0])).mean()  # type: ignore[no-any-return]

            def discriminator_loss(self, batch: Any) -> Tensor:
                fake = self.generator(batch[0]).detach()
                return (self.discriminator(fake) - self.discriminator(batch[0])).mean()  # type: ignore[no-any-return]

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                pass

            def configure_optimizers(self) -> Any:
                both = [torch.optim.Adam(part.parameters()) for part in (self.generator, self.discriminator)]
                return both, [torch.optim.lr_scheduler.StepLR(both[0], 1)]

        yield names | {"Given": Given, "strategy": "ddp_join_find_unused_parameters_true"}


@contextmanager
def counting(rank: int) -> Iterator[Names]:
    """For a LightningModule with a joinable of torch's kind."""
    from tests.support.joinables import Counter

    with lightning(rank) as names:
        yield names | {"Counter": Counter}


@contextmanager
def fabric(rank: int) -> Iterator[Names]:
    """For Fabric, which has begun."""
    from lightning.fabric import Fabric

    import lightning_join

    make, launch = Fabric.__init__, Fabric.launch

    def make_here(fabric: Any, **given: Any) -> None:
        make(fabric, **{"accelerator": "cpu"} | given | {"devices": dist.get_world_size()})

    def launch_here(fabric: Any, *args: Any) -> Any:
        inside.remove_launcher(fabric)
        return launch(fabric, *args)

    with mock.patch.object(Fabric, "__init__", make_here), mock.patch.object(Fabric, "launch", launch_here):
        names = base(rank)
        fabric = Fabric(strategy="ddp_join")
        fabric.launch()
        model = names["net"]
        loader = fabric.setup_dataloaders(DataLoader(Shard(rank), SIZE), use_distributed_sampler=False)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        yield names | {
            "lightning_join": lightning_join,
            "Fabric": Fabric,
            "fabric": fabric,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            "loader": loader,
            "test_loader": DataLoader(Rows(rank), SIZE),
        }


@contextmanager
def accelerate(rank: int) -> Iterator[Names]:
    """For Accelerate: all prepared, but for a loader that is this rank's own."""
    from accelerate import Accelerator

    import accelerate_join

    make = Accelerator.__init__

    def make_here(accelerator: Any, *args: Any, **given: Any) -> None:
        make(accelerator, *args, **{"cpu": True} | given)

    with mock.patch.object(Accelerator, "__init__", make_here), accelerator_of(rank) as accelerator:
        names = base(rank)
        optimizer = torch.optim.AdamW(names["net"].parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        yield names | {
            "accelerate_join": accelerate_join,
            "Accelerator": accelerate_join.Accelerator,
            "accelerator": accelerator,
            "model": names["net"],
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": DataLoader(Shard(rank), SIZE),
            "test_loader": DataLoader(Rows(rank), SIZE),
        }


@contextmanager
def sentences(rank: int) -> Iterator[Names]:
    """The same, over sentences, all of it prepared."""
    from accelerate.data_loader import DataLoaderShard

    with accelerate(rank) as names:
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = names["accelerator"].prepare(model, optimizer)
        yield names | {"model": model, "optimizer": optimizer, "loader": DataLoaderShard(Tokens(rank), batch_size=SIZE)}


@contextmanager
def saved(rank: int) -> Iterator[Names]:
    """The same, where another job has saved its state."""
    from accelerate.utils import DataLoaderConfiguration

    with accelerate(rank) as names:
        accelerator = names["Accelerator"](dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        net = base(rank)["net"]
        data = TensorDataset(*names["dataset"].tensors)
        names["loader"] = DataLoader(data, 1)
        accelerator.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(data, 1))
        accelerator.save_state("checkpoint")
        accelerator.free_memory()
        yield names


@contextmanager
def transformers(rank: int) -> Iterator[Names]:
    """For transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    from tests.support.front_ends.transformers import Net, Samples

    with accelerate(rank) as names:
        arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to=[], num_train_epochs=1)
        yield names | {
            "Trainer": Trainer,
            "args": arguments,
            "model": Net(counts=True),
            "my_shard": Samples(10 * rank, 1 + 2 * rank),
        }


KINDS: dict[str, Callable[[int], AbstractContextManager[Names]]] = {
    "plain": plain,
    "resuming": resuming,
    "accuracy": accuracy,
    "tokens": tokens,
    "engine": engine,
    "sharded": sharded,
    "fsdp": fsdp,
    "lightning": lightning,
    "windows": windowed,
    "gan": gan,
    "counting": counting,
    "fabric": fabric,
    "accelerate": accelerate,
    "sentences": sentences,
    "resuming accelerate": saved,
    "transformers": transformers,
}
# What a page's snippets are given where they do not say it, by a word in its name.
PAGES = {kind: kind for kind in KINDS}


def kind_of(page: str) -> str:
    """Return which names a page's snippets are given."""
    return next((kind for word, kind in PAGES.items() if word in Path(page).name), "plain")


def run(rank: int, page: str, code: str, kind: str, folder: str) -> None:
    """Run a snippet on this rank."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with KINDS[kind](rank) as names:
            exec(compile(code, page, "exec"), names)
    finally:
        os.chdir(before)


def check_program(workers: Workers, program: Program, folder: Path) -> None:
    """Run a program, and look how it ends."""
    if (package := program.said("needs")) and importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package} here")
    code = program.code
    if template := program.said("in"):
        code = fill(TEMPLATES[template], code)
    kind = program.said("given") or kind_of(program.snippets[0].page)
    if kind == "transformers":
        pytest.importorskip("transformers")
    outcomes = workers.outcomes(2, run, program.name, code, kind, str(folder))
    if error := program.said("raises"):
        assert all(error in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    else:
        assert not any(outcome.error for outcome in outcomes), "\n".join(outcome.trace for outcome in outcomes)
