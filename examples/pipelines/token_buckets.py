"""Batch sentences by a budget of tokens, in Accelerate, so that each token counts the same.

    torchrun --nproc-per-node=3 examples/pipelines/token_buckets.py

A bucket holds sentences of like length, as many as the budget has room for. How many that is depends on the lengths,
so each process has another number of batches and of sentences in them. The sentences are those of this
repository's LICENSE; the model learns to tell the next letter.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.data_loader import DataLoaderShard
from one_process import EPOCHS, check
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from accelerate_join import Accelerator

BUDGET, PADDING = 1500, -100
Batch = tuple[list[int], Tensor]  # the sentences' ids, and their letters
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
SENTENCES = [torch.tensor([*sentence.encode("ascii")]) for sentence in " ".join(TEXT.split()).split(". ")]


class TokenBuckets(Sampler[list[int]]):
    """Batches of a process's own sentences, padded to at most so many tokens, in another order in each epoch."""

    def __init__(self, ids: list[int], seed: int) -> None:
        self.ids, self.random = sorted(ids, key=lambda i: len(SENTENCES[i])), random.Random(seed)

    def __iter__(self) -> Iterator[list[int]]:
        batches: list[list[int]] = [[]]
        for i in self.ids:  # the last one is the longest
            if batches[-1] and (len(batches[-1]) + 1) * len(SENTENCES[i]) > BUDGET:
                batches.append([])
            batches[-1].append(i)
        self.random.shuffle(batches)
        yield from batches


def collate(ids: list[int]) -> Batch:
    return ids, pad_sequence([SENTENCES[i] for i in ids], batch_first=True, padding_value=PADDING)


def tokens(batch: Batch) -> Tensor:
    """Count what the loss is a mean over: each letter but a sentence's first."""
    return (batch[1][:, 1:] != PADDING).sum()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, letters: Tensor) -> Tensor:
    scores = model(letters[:, :-1].clamp(min=0))
    return cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten(), ignore_index=PADDING)


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank, ids = accelerator.process_index, list(range(len(SENTENCES)))
    shard = ids[: len(ids) // 2] if rank == 0 else ids[len(ids) // 2 :][rank - 1 :: 2]
    loader = DataLoaderShard(ids, batch_sampler=TokenBuckets(shard, seed=rank), collate_fn=collate)
    network, optimizer = model_and_optimizer()
    model, optimizer = accelerator.prepare(network, optimizer)
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    with accelerator.join_uneven_inputs(weighting=tokens):
        for epoch in range(EPOCHS):
            for batch_ids, letters in loader:
                accelerator.backward(loss_of(model, letters))
                optimizer.step()
                optimizer.zero_grad()
                trained[epoch].append(batch_ids)
    check(trained, network, ids, model_and_optimizer, lambda model, ids: loss_of(model, collate(ids)[1]))
    accelerator.end_training()


if __name__ == "__main__":
    main()
