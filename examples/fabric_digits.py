"""Train on handwritten digits with Lightning Fabric, on three processes whose shards are uneven.

    python examples/fabric_digits.py   # starts the three itself

The shards hold 70, 20 and 10 percent of the images. Ends with the largest difference of the parameters
from those of one process on the same schedule, and with the accuracy of both.
"""

import copy
import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import lightning_join  # noqa: F401  registers the strategies

SHARES = (0.7, 0.2, 0.1)
EPOCHS = 4
BATCH_SIZE = 20
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


def loader_of(shard: Dataset[Any], rank: int) -> DataLoader[Any]:
    return DataLoader(shard, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(rank))


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=3e-3)


def train(network: nn.Module, fabric: Fabric) -> float:
    """Train on all processes and return the accuracy."""
    shards, test = load_data()
    model, optimizer = fabric.setup(network, optimizer_of(network))
    loader = fabric.setup_dataloaders(
        loader_of(shards[fabric.global_rank], fabric.global_rank), use_distributed_sampler=False
    )
    test_loader = fabric.setup_dataloaders(DataLoader(test, BATCH_SIZE))  # which Fabric shards, without padding
    accuracy = 0.0
    for epoch in range(EPOCHS):
        for images, labels in loader:  # serves, in its end, the processes that have more batches
            fabric.backward(cross_entropy(model(images), labels))
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
        correct = torch.zeros(2)
        with torch.no_grad():
            for images, labels in test_loader:
                correct += torch.tensor([int((model(images).argmax(dim=1) == labels).sum()), len(labels)])
        right, total = fabric.all_reduce(correct, reduce_op="sum").tolist()
        accuracy = right / total
        fabric.print(f"Epoch {epoch + 1}: {total:.0f} test images, accuracy {accuracy:.4%}")
    return accuracy


def train_in_one_process(network: nn.Module) -> float:
    """Do what the processes do together: sum the mean losses of those that have a batch, over their number."""
    shards, test = load_data()
    optimizer = optimizer_of(network)
    loaders = [loader_of(shard, rank) for rank, shard in enumerate(shards)]
    for _ in range(EPOCHS):
        iterators = [iter(loader) for loader in loaders]
        for _ in range(max(len(loader) for loader in loaders)):
            batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
            for images, labels in batches:
                (cross_entropy(network(images), labels) / len(SHARES)).backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        correct = sum(int((network(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(test, BATCH_SIZE))
    return correct / len(test)  # type: ignore[arg-type]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    fabric = Fabric(accelerator="cpu", devices=len(SHARES), strategy="ddp_join")
    fabric.launch()
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
    reference = copy.deepcopy(network)
    accuracy = train(network, fabric)
    expected = train_in_one_process(reference)  # on every process, so that each one's parameters are compared
    one, other = (nn.utils.parameters_to_vector(n.parameters()).detach() for n in (network, reference))
    difference = float(fabric.all_gather((one - other).abs().max()).max())
    fabric.print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
    fabric.print(f"Accuracy {accuracy:.4%}, of one process {expected:.4%}")
    if not difference <= TOLERANCE:  # NaN neither
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")
    if accuracy != expected:
        sys.exit("The accuracy differs from that of one process.")


if __name__ == "__main__":
    main()
