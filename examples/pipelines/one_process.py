"""What these pipelines share: the digits, a small model, and the comparison with one process.

A pipeline of yours needs none of this.
"""

import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

WORLD_SIZE, EPOCHS, BATCH_SIZE = 3, 3, 16
TOLERANCE = 1e-10


def digits(number: int | None = None) -> tuple[Tensor, Tensor]:
    """Return so many images and their labels; a sample's id is its place here."""
    data = load_digits()
    return torch.tensor(data.data[:number] / 16), torch.tensor(data.target[:number])  # in float64: a sharp comparison


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same on each rank, and each time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def start(work: Callable[[int], Any], world_size: int = WORLD_SIZE) -> None:
    """Call a function in several processes, with a process group."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(work, f"file://{folder}/rendezvous", world_size), nprocs=world_size)


def _work(rank: int, work: Callable[[int], Any], rendezvous: str, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    work(rank)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter


def load_trained(folder: Path, epoch: int, step: int) -> list[list[list[int]]]:
    """Return what the ranks of the job before had trained on, those of them that this one stands for, until a step."""
    places = range(dist.get_rank(), WORLD_SIZE, dist.get_world_size())
    before = [torch.load(folder / f"trained_{rank}.pt") for rank in places]
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    for each in range(epoch + 1):
        steps = max([step if each == epoch else 0, *(len(of[each]) for of in before)])
        trained[each] = [[i for of in before for ids in of[each][at : at + 1] for i in ids] for at in range(steps)]
    return trained


def check_digits(trained: list[list[list[int]]], model: nn.Module, wanted: Iterable[int]) -> None:
    """Check a training of `model_and_optimizer()` on the mean loss over the samples of each step."""
    images, labels = digits()

    def loss_of(model: nn.Module, ids: list[int]) -> Tensor:
        return cross_entropy(model(images[ids]), labels[ids])

    check(trained, model, wanted, model_and_optimizer, loss_of)


def check(
    trained: list[list[list[int]]],
    model: nn.Module,
    wanted: Iterable[int],
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    loss_of: Callable[[nn.Module, list[int]], Tensor],
) -> None:
    """Compare with one process, which trains in each step on what all ranks trained on in that step.

    Args:
        trained: The ids of the samples that this rank trained on, by epoch and batch.
        model: This rank's model, after the training.
        wanted: The ids of the samples that are to be trained on once in each epoch.
        make: Makes the model as it was before the training, and its optimizer.
        loss_of: Gives the model's loss on the samples with these ids.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, trained)
    reference, optimizer = make()
    once = Counter(wanted)
    for epoch, batches in enumerate(zip(*by_rank, strict=True)):
        counts = Counter(i for of_rank in batches for ids in of_rank for i in ids)
        if counts != once:
            sys.exit(f"Epoch {epoch}: trained on too often {counts - once}, too seldom {once - counts}")
        if dist.get_rank() == 0:
            numbers = ", ".join(str(len(of_rank)) for of_rank in batches)
            print(f"Epoch {epoch}: batches by rank: {numbers}. Each of {len(once)} samples was trained exactly once.")
        for of_step in zip_longest(*batches, fillvalue=[]):
            optimizer.zero_grad()
            loss_of(reference, [i for ids in of_step for i in ids]).backward()
            optimizer.step()
    one, other = (parameters_to_vector(m.parameters()).detach() for m in (model, reference))
    difference = (one - other).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
    if not difference <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")
