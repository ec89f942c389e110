"""Train a sharded model on handwritten digits, with two processes whose shards of the data are uneven.

    python examples/sharded_digits.py

The model is sharded by `fully_shard`. The shards of the data hold 80 and 20 percent of the images. Ends with the
largest difference of the parameters from those of one process on the same schedule.
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
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from torch_join import Join

SHARES = (0.8, 0.2)
EPOCHS = 4
BATCH_SIZE = 20
CLIP = 1.0
SEED = 7
TOLERANCE = 1e-10


def load_data() -> list[DataLoader[Any]]:
    """Return the loader of each rank, shuffled anew in each epoch."""
    digits = load_digits()
    # In float64, so that the comparison at the end is sharp.
    dataset = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(SEED)
    return [
        DataLoader(shard, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(SEED + rank))
        for rank, shard in enumerate(random_split(dataset, SHARES, generator))
    ]


def network() -> nn.Sequential:
    torch.manual_seed(SEED)
    layers = (nn.Sequential(nn.Linear(size, 48), nn.ReLU()) for size in (64, 48, 48))
    return nn.Sequential(*layers, nn.Linear(48, 10)).double()


def optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.8)


def train(model: nn.Sequential, rank: int) -> None:
    for layer in model[:-1]:
        fully_shard(layer)
    fully_shard(model)
    optimizer, scheduler = optimizer_and_scheduler(model)
    loader = load_data()[rank]
    with Join([model, optimizer, scheduler], weighting="samples") as join:
        for epoch in range(EPOCHS):
            for images, labels in join.batches(loader):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
            if rank == 0:
                print(f"Epoch {epoch + 1}: loss {loss.item():.3f}, learning rate {scheduler.get_last_lr()[0]:.1e}")


def train_in_one_process(model: nn.Module) -> None:
    """Do what the ranks do together: each step is the mean over the samples of all batches that there are."""
    loaders = load_data()
    optimizer, scheduler = optimizer_and_scheduler(model)
    for _ in range(EPOCHS):
        iterators = [iter(loader) for loader in loaders]
        while batches := [batch for iterator in iterators if (batch := next(iterator, None)) is not None]:
            optimizer.zero_grad()
            images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()


def whole(parameter: Any) -> Tensor:
    """Return a parameter of which each rank holds a shard; all ranks call it."""
    tensor: Tensor = parameter.full_tensor().detach()
    return tensor


def work(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(SHARES))
    model = network()
    reference = copy.deepcopy(model)
    train(model, rank)
    train_in_one_process(reference)  # on every rank, so that each one's parameters are compared
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    difference = torch.stack([(whole(mine) - theirs.detach()).abs().max() for mine, theirs in pairs]).max()
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
