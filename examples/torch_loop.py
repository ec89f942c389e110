"""Train on handwritten digits in a plain PyTorch loop, with three processes whose shards are uneven.

    python examples/torch_loop.py

The shards hold 70, 20 and 10 percent of the images. Ends with the largest difference of the parameters
from those of one process on the same schedule.
"""

import copy
import gc
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from torch_join import Join

SHARES = (0.7, 0.2, 0.1)
EPOCHS = 4
BATCH_SIZE = 20
CLIP = 1.0
SEED = 7
TOLERANCE = 1e-10


def load_data() -> tuple[list[DataLoader[Any]], Dataset[Any]]:
    """Return the loader of each rank, shuffled anew in each epoch, and the images for the test."""
    digits = load_digits()
    # In float64, so that the comparison at the end is sharp.
    dataset = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(SEED)
    train, test = random_split(dataset, (0.8, 0.2), generator)
    loaders: list[DataLoader[Any]] = [
        DataLoader(shard, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(SEED + rank))
        for rank, shard in enumerate(random_split(train, SHARES, generator))
    ]
    return loaders, test


def optimizer_and_scheduler(network: nn.Module) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.8)


def train(network: nn.Module, rank: int) -> None:
    loaders, test = load_data()
    ddp = DistributedDataParallel(network)
    optimizer, scheduler = optimizer_and_scheduler(network)
    with Join([ddp, optimizer, scheduler]) as join:
        for epoch in range(EPOCHS):
            for images, labels in join.batches(loaders[rank]):
                optimizer.zero_grad()
                cross_entropy(ddp(images), labels).backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
            # All ranks leave the loop together and hold the same state.
            accuracy = evaluate(network, test, rank)
            if rank == 0:
                rate = scheduler.get_last_lr()[0]
                print(f"Epoch {epoch + 1}: test accuracy {accuracy:.1%}, learning rate {rate:.1e}")


def evaluate(network: nn.Module, test: Any, rank: int) -> float:
    """Return the accuracy; each rank looks at its share of the images."""
    images, labels = test[list(range(rank, len(test), len(SHARES)))]
    with torch.no_grad():
        correct = (network(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return int(correct) / len(test)


def train_in_one_process(network: nn.Module) -> None:
    """Do what the ranks do together: sum the mean losses of those that have a batch, over the world size."""
    loaders, _ = load_data()
    optimizer, scheduler = optimizer_and_scheduler(network)
    for _ in range(EPOCHS):
        iterators = [iter(loader) for loader in loaders]
        while batches := [batch for iterator in iterators if (batch := next(iterator, None)) is not None]:
            optimizer.zero_grad()
            for images, labels in batches:
                loss = cross_entropy(network(images), labels) / len(SHARES)
                loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            scheduler.step()


def work(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(SHARES))
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
    reference = copy.deepcopy(network)
    train(network, rank)
    train_in_one_process(reference)  # on every rank, so that each one's parameters are compared
    one, other = (nn.utils.parameters_to_vector(n.parameters()).detach() for n in (network, reference))
    difference = (one - other).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter
    if rank == 0:
        print(f"Largest difference of a parameter from one process on the same schedule: {difference.item():.1e}")
    if not difference <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")


def main() -> None:
    loaders, _ = load_data()
    print("Batches in an epoch:", ", ".join(f"{len(loader)} on rank {rank}" for rank, loader in enumerate(loaders)))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"file://{folder}/rendezvous",), nprocs=len(SHARES))


if __name__ == "__main__":
    main()
