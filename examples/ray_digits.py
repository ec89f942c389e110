"""Train on handwritten digits with three workers of Ray Train, whose shards of one dataset have different sizes.

    pip install "torch-join[ray]" scikit-learn
    python examples/ray_digits.py

Each image is trained on once in each epoch. Ends with the largest difference of the parameters from those of one
process on the same schedule.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_join import Join
from torch_join.ray import Report, UnequalShards

WORKERS = 3
EPOCHS = 2
BATCH_SIZE = 20
IMAGES = 1500
SEED = 7
TOLERANCE = 1e-10
Schedule = list[list[list[int]]]  # by epoch and step, the numbers of a batch's images


def digits() -> tuple[Tensor, Tensor]:
    """Return the images and their labels, in float64, so that the comparison at the end is sharp."""
    found = load_digits()
    return torch.tensor(found.data[:IMAGES] / 16), torch.tensor(found.target[:IMAGES])


def optimizer_and_scheduler(network: nn.Module) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.8)


def train(network: nn.Module) -> Schedule:
    """Train on this worker's shard, and return what it was."""
    images, labels = digits()
    schedule: Schedule = []
    ddp = prepare_model(network)
    optimizer, scheduler = optimizer_and_scheduler(network)
    shard, report = ray.train.get_dataset_shard("train"), Report()
    with Join([ddp, optimizer, scheduler, report]) as join:
        for epoch in range(EPOCHS):
            schedule.append([])
            for batch in join.batches(shard.iter_torch_batches(batch_size=BATCH_SIZE)):
                numbers = batch["id"].cpu()
                optimizer.zero_grad()
                loss = cross_entropy(ddp(images[numbers]), labels[numbers])
                loss.backward()
                optimizer.step()
                scheduler.step()
                schedule[-1].append(numbers.tolist())
                if join.step % 10 == 9:
                    report({"epoch": epoch, "step": join.step, "loss": loss.item()})
            with tempfile.TemporaryDirectory() as folder:  # all workers have left the loop together
                torch.save(network.state_dict(), Path(folder) / "network.pt")
                is_first = ray.train.get_context().get_world_rank() == 0
                report({"epoch": epoch}, ray.train.Checkpoint.from_directory(folder) if is_first else None)
    return schedule


def train_in_one_process(network: nn.Module, schedules: list[Schedule]) -> None:
    """Do what the workers do together: sum the mean losses of those that have a batch, over their number."""
    images, labels = digits()
    optimizer, scheduler = optimizer_and_scheduler(network)
    for epoch in range(EPOCHS):
        for step in range(max(len(schedule[epoch]) for schedule in schedules)):
            optimizer.zero_grad()
            for batches in (schedule[epoch] for schedule in schedules):
                if step < len(batches):
                    loss = cross_entropy(network(images[batches[step]]), labels[batches[step]])
                    (loss / WORKERS).backward()
            optimizer.step()
            scheduler.step()


def work() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).double()
    reference = copy.deepcopy(network)
    schedules: list[Any] = [None] * WORKERS
    dist.all_gather_object(schedules, train(network))
    train_in_one_process(reference, schedules)
    one, other = (nn.utils.parameters_to_vector(n.parameters()).detach() for n in (network, reference))
    difference = (one - other).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    seen = sorted(number for schedule in schedules for epoch in schedule for batch in epoch for number in batch)
    if not difference <= TOLERANCE or seen != sorted([*range(IMAGES)] * EPOCHS):  # NaN neither
        raise RuntimeError(f"The parameters differ from those of one process by {difference:.1e}, or images are lost.")
    if ray.train.get_context().get_world_rank() == 0:
        for rank, schedule in enumerate(schedules):
            print(f"Rank {rank}: {', '.join(str(len(epoch)) for epoch in schedule)} batches")
        print(f"Largest difference of a parameter from one process on the same schedule: {difference.item():.1e}")


def main() -> None:
    ray.init(num_cpus=WORKERS + 1)  # whatever this machine has: a CPU for each worker, and one for the data
    trainer = TorchTrainer(
        work,
        datasets={"train": ray.data.range(IMAGES, override_num_blocks=7)},
        dataset_config=UnequalShards(),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
