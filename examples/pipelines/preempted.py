"""Train with `StatefulDataLoader` in a plain PyTorch loop; a SIGTERM ends the job in an epoch, and another goes on.

    python examples/pipelines/preempted.py     # starts three processes, twice
    python examples/pipelines/preempted.py 2   # goes on with two

A cluster sends SIGTERM before it takes its machines back. By then rank 2 has run out of batches: its place is in the
checkpoint too, which one rank writes. Where another number of ranks comes back, all have one dataset, in an order that
a sampler deals out to them: what is left of the epoch is dealt out anew.
"""

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_process import BATCH_SIZE, EPOCHS, WORLD_SIZE, check_digits, digits, load_trained, model_and_optimizer, start
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from torch_join import Join, UnpaddedDistributedSampler

SHARDS = (range(150), range(150, 270), range(270, 300))  # the samples' ids: 10, 8 and 2 batches
PREEMPTED = (1, 5)  # the epoch and its step


def loader_of(rank: int, is_dealt: bool) -> StatefulDataLoader[Any]:
    images, labels = digits()
    ids = torch.tensor(range(SHARDS[-1].stop) if is_dealt else SHARDS[rank])
    shard = TensorDataset(ids, images[ids], labels[ids])
    if is_dealt:
        return StatefulDataLoader(shard, BATCH_SIZE, sampler=UnpaddedDistributedSampler(shard))
    sampler = RandomSampler(shard, generator=torch.Generator().manual_seed(rank))  # torchdata's, which has a state
    return StatefulDataLoader(shard, BATCH_SIZE, sampler=sampler)


def work(rank: int, folder: Path, is_first_job: bool, is_dealt: bool = False) -> None:
    network, optimizer = model_and_optimizer()
    ddp, loader = DistributedDataParallel(network), loader_of(rank, is_dealt)
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]  # for the comparison in the end
    join, first_epoch = Join([ddp, optimizer], weighting="samples"), 0
    if not is_first_job:
        checkpoint = torch.load(folder / "checkpoint.pt")
        network.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        join.load_state_dict(checkpoint["join"])
        first_epoch, step = checkpoint["epoch"], checkpoint["join"]["step"] if is_dealt else 0
        trained = load_trained(folder, first_epoch, step)
    with join:
        for epoch in range(first_epoch, EPOCHS):
            if is_dealt:
                loader.sampler.set_epoch(epoch)
            for ids, images, labels in join.batches(loader):
                optimizer.zero_grad()
                cross_entropy(ddp(images), labels).backward()
                optimizer.step()
                trained[epoch].append(ids.tolist())
                if is_first_job and rank == 1 and (epoch, join.step) == PREEMPTED:
                    os.kill(os.getpid(), signal.SIGTERM)  # as the cluster does
                if join.stop_requested():  # ranks may get the signal at different steps, and all stop at one
                    position = join.state_dict()  # of all ranks
                    if rank == join.active_ranks[0]:
                        states = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**states, "join": position, "epoch": epoch}, folder / "checkpoint.pt")
                        print(f"Epoch {epoch}: preempted at step {join.step}; ranks with a batch: {join.active_ranks}")
                    break
            if join.stop_requested():  # ranks that had run out hear of it here
                torch.save(trained, folder / f"trained_{rank}.pt")
                return
    check_digits(trained, network, range(SHARDS[-1].stop))


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else WORLD_SIZE
    with tempfile.TemporaryDirectory() as folder:
        job = partial(work, folder=Path(folder), is_dealt=number != WORLD_SIZE)
        start(partial(job, is_first_job=True))
        start(partial(job, is_first_job=False), number)
