"""Train on handwritten digits with Accelerate, on three processes whose shards are uneven.

    torchrun --nproc-per-node=3 examples/accelerate_digits.py
    accelerate launch --multi_gpu --num_processes 3 examples/accelerate_digits.py   # on CPUs too
    python examples/accelerate_digits.py --notebook   # starts the three itself, as a notebook would

The shards hold 70, 20 and 10 percent of the images. Ends with the largest difference of the parameters
from those of one process on the same schedule, and with the accuracy of both.
"""

import argparse
import copy
import socket
import sys
from typing import Any

import torch
from accelerate import notebook_launcher
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import gather_object
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from tqdm.auto import tqdm

from accelerate_join import Accelerator

SHARES = (0.7, 0.2, 0.1)
EPOCHS = 4
BATCH_SIZE = 20
ACCUMULATE = 2
CLIP = 1.0
SEED = 7
TOLERANCE = 1e-10


def load_data() -> tuple[list[Dataset[Any]], Dataset[Any]]:
    """Return the shard of each process, and the images for the test."""
    digits = load_digits()
    # In float64, so that the comparison at the end is sharp.
    dataset = TensorDataset(torch.tensor(digits.data / 16), torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(SEED)
    train, test = random_split(dataset, (0.8, 0.2), generator)
    return list(random_split(train, SHARES, generator)), test


def loader_of(shard: Dataset[Any], rank: int) -> DataLoaderShard:
    """Return a loader of this process's own shard, as `prepare` would make it if it did not shard it once more."""
    return DataLoaderShard(shard, batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(rank))


def optimizer_and_scheduler(network: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=60, gamma=0.8)


def train(network: nn.Module, accelerator: Accelerator) -> float:
    """Train on all processes and return the accuracy, on the main one."""
    shards, test = load_data()
    optimizer, scheduler = optimizer_and_scheduler(network)
    model, optimizer, scheduler, test_loader = accelerator.prepare(
        network, optimizer, scheduler, DataLoader(test, BATCH_SIZE)
    )
    loader = loader_of(shards[accelerator.process_index], accelerator.process_index)
    accelerator.print("Batches in an epoch, by process:", gather_object([len(loader)]))
    accuracy = 0.0
    with accelerator.join_uneven_inputs():
        for epoch in range(EPOCHS):
            for images, labels in tqdm(loader, disable=not accelerator.is_main_process):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(images), labels))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            # All processes leave the loop together and hold the same state.
            correct = total = 0
            with torch.no_grad():
                for images, labels in test_loader:
                    found, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
                    correct += int((found == labels).sum())
                    total += len(labels)
            accuracy = correct / total
            accelerator.print(f"Epoch {epoch + 1}: {total} test images, accuracy {accuracy:.4%}")
    return accuracy


def train_in_one_process(network: nn.Module) -> float:
    """Do what the processes do together: sum the mean losses of those that have a batch, over their number."""
    shards, test = load_data()
    optimizer, scheduler = optimizer_and_scheduler(network)
    loaders = [loader_of(shard, rank) for rank, shard in enumerate(shards)]
    longest = max(len(loader) for loader in loaders)
    for _ in range(EPOCHS):
        iterators = [iter(loader) for loader in loaders]
        for step in range(1, longest + 1):
            batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
            for images, labels in batches:
                (cross_entropy(network(images), labels) / ACCUMULATE / len(SHARES)).backward()
            if step % ACCUMULATE == 0 or step == longest:
                nn.utils.clip_grad_norm_(network.parameters(), CLIP)
                optimizer.step()
                for _ in SHARES:  # as Accelerate does for each of its processes
                    scheduler.step()
                optimizer.zero_grad()
    with torch.no_grad():
        correct = sum(int((network(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(test, BATCH_SIZE))
    return correct / len(test)  # type: ignore[arg-type]


def work() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    if accelerator.num_processes != len(SHARES):
        sys.exit(
            f"This takes {len(SHARES)} processes, not {accelerator.num_processes}: see --help for how to start them."
        )
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
    reference = copy.deepcopy(network)
    accuracy = train(network, accelerator)
    expected = train_in_one_process(reference)  # on every process, so that each one's parameters are compared
    one, other = (nn.utils.parameters_to_vector(n.parameters()).detach() for n in (network, reference))
    difference = accelerator.reduce((one - other).abs().max(), "max").item()
    accelerator.print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
    accelerator.print(f"Accuracy {accuracy:.4%}, of one process {expected:.4%}")
    if not difference <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")
    if accelerator.is_main_process and accuracy != expected:
        sys.exit("The accuracy differs from that of one process.")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notebook", action="store_true", help="start the processes by notebook_launcher")
    if parser.parse_args().notebook:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        notebook_launcher(work, num_processes=len(SHARES), use_port=str(port))
    else:
        work()


if __name__ == "__main__":
    main()
