"""Train a mixture of experts, one expert on each of three processes, whose shards of the data are uneven.

    python examples/experts.py

A rank that has run out of batches holds an expert that the others' samples go through. So it runs the step itself, on
its last batch, whose loss counts zero. Ends with the largest difference of the parameters from those of one process on
the same schedule.
"""

import gc
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split

from torch_join import Join

SHARES = (0.2, 0.5, 0.3)
EPOCHS = 2
BATCH_SIZE = 20
WIDTH = 32
SEED = 7
TOLERANCE = 1e-10


class Exchange(torch.autograd.Function):
    """Sends rows to other ranks, as many as each is to get; their gradients come back in the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.counts = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Exchange.apply(gradient, *ctx.counts), None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """Each row goes through the expert that the router chooses: that of a rank, or, in one process, one of all."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.router = nn.Linear(WIDTH, len(SHARES))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in SHARES)

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(SHARES))
        rows = x[order]
        if self.ranks == 1:
            parts = zip(rows.split(counts.tolist()), self.experts, strict=True)
            done = torch.cat([torch.tanh(expert(part)) for part, expert in parts])
        else:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sent, received = counts.tolist(), theirs.tolist()
            own = self.experts[dist.get_rank()]
            rows = Exchange.apply(rows, received, sent)  # type: ignore[no-untyped-call]
            done = Exchange.apply(torch.tanh(own(rows)), sent, received)  # type: ignore[no-untyped-call]
        return x + gate[:, None] * torch.empty_like(done).index_copy(0, order, done)


def network(ranks: int) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), Experts(ranks), nn.Linear(WIDTH, 10)).double()


def load_data() -> list[DataLoader[Any]]:
    """Return the loader of each rank."""
    digits = load_digits()
    # In float64, so that the comparison at the end is sharp.
    dataset = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
    return [
        DataLoader(shard, BATCH_SIZE) for shard in random_split(dataset, SHARES, torch.Generator().manual_seed(SEED))
    ]


def train(model: nn.Sequential, rank: int) -> None:
    ranks = len(SHARES)
    ignored = [name for name, _ in model.named_parameters() if "experts" in name]  # each rank has its own
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp, own = DistributedDataParallel(model), model[2].experts[rank]  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = load_data()[rank]
    with Join([ddp, optimizer], weighting="samples", placeholder="last") as join:
        for epoch in range(EPOCHS):
            for images, labels in join.batches(loader):
                optimizer.zero_grad()
                loss = cross_entropy(ddp(images), labels)
                loss.backward()
                for parameter in own.parameters():
                    parameter.grad /= ranks  # of all ranks' samples, as DDP averages the others
                optimizer.step()
            if rank == 0:
                print(f"Epoch {epoch + 1}: {join.step} steps, {len(loader)} of them with a batch on rank 0")


def train_in_one_process(model: nn.Sequential) -> None:
    """Do what the ranks do together: each step is the mean over the samples of all batches that there are."""
    loaders, optimizer = load_data(), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(EPOCHS):
        iterators = [iter(loader) for loader in loaders]
        while batches := [batch for iterator in iterators if (batch := next(iterator, None)) is not None]:
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()


def work(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(SHARES))
    model, reference = network(len(SHARES)), network(1)
    train(model, rank)
    train_in_one_process(reference)
    others = [f"2.experts.{expert}." for expert in range(len(SHARES)) if expert != rank]
    mine, theirs = model.state_dict(), reference.state_dict()
    compared = [name for name in mine if not name.startswith(tuple(others))]
    difference = torch.stack([(mine[name] - theirs[name]).abs().max() for name in compared]).max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter
    if rank == 0:
        print(f"Largest difference of a parameter from one process on the same schedule: {difference.item():.1e}")
    if not difference <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")


def main() -> None:
    loaders = load_data()
    print("Batches in an epoch:", ", ".join(f"{len(loader)} on rank {rank}" for rank, loader in enumerate(loaders)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"file://{folder}/rendezvous",), nprocs=len(SHARES))


if __name__ == "__main__":
    main()
