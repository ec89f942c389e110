"""Train a tiny GPT-2 with transformers' Trainer on streams of text of unequal length.

    python examples/transformers_gpt2.py   # starts two processes; with torchrun it would be `train` alone

Nobody knows how many batches a stream has. Ends with the largest difference of the parameters from those of one process
that trains on both texts, with a plain Trainer.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from accelerate_join.transformers import JoinTrainer

CONTEXT, STEPS = 16, 40
TEXTS = ("a rank that has run out of batches stays in step " * 4, "until the last one is done " * 13)
LETTERS = sorted({*"".join(TEXTS)})
TOLERANCE = 1e-10
NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


class Stream(IterableDataset[dict[str, Tensor]]):
    """The windows of a text."""

    def __init__(self, text: str) -> None:
        self.letters = torch.tensor([LETTERS.index(letter) for letter in text])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for begin in range(0, len(self.letters) - CONTEXT, CONTEXT):
            window = self.letters[begin : begin + CONTEXT]
            yield {"input_ids": window, "labels": window}


class BothStreams(Trainer):
    """A trainer in one process, whose batches are those of both ranks."""

    def get_train_dataloader(self) -> Any:
        streams = [DataLoader(Stream(text), self.args.per_device_train_batch_size) for text in TEXTS]
        return DataLoader(Unions(streams), batch_size=None)


class Unions(IterableDataset[dict[str, Tensor]]):
    def __init__(self, loaders: list[Any]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        iterators = [iter(loader) for loader in self.loaders]
        while parts := [part for iterator in iterators if (part := next(iterator, None)) is not None]:
            yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def make(kind: type[Trainer], stream: Stream, folder: str, **options: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": CONTEXT, "vocab_size": len(LETTERS)}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, **dict.fromkeys(NO_DROPOUT, 0.0), bos_token_id=0, eos_token_id=0)
    ).double()
    args = TrainingArguments(
        folder,
        max_steps=STEPS,  # streams have no length; one that has ended begins again, on all ranks together
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(model, args, train_dataset=stream, compute_loss_func=loss_of, **options)


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Return what GPT-2 does itself, in float64."""
    total = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def train(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(TEXTS)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    torch.set_num_threads(1)
    trainer = make(JoinTrainer, Stream(TEXTS[rank]), folder, own_shards=True)
    trainer.train()
    trainer.save_model(folder + "/trained")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=len(TEXTS))
        found: Any = GPT2LMHeadModel.from_pretrained(folder + "/trained", dtype=torch.float64)
        trainer = make(BothStreams, Stream(TEXTS[0]), folder)
        trainer.train()
        reference: Any = trainer.model
        pairs = zip(found.parameters(), reference.parameters(), strict=True)
        difference = max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)
        print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
        if not difference <= TOLERANCE:
            sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
