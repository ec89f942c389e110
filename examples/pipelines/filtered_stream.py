"""Train on a filtered stream, in a plain PyTorch loop: the filter drops another share on each rank.

    python examples/pipelines/filtered_stream.py   # starts three processes

The images come sorted by how dark they are, a third for each rank, and the filter keeps the dark ones. So nobody
knows how many batches a rank has, and rank 0 has none at all.
"""

from collections.abc import Iterator

from one_process import BATCH_SIZE, EPOCHS, WORLD_SIZE, check_digits, digits, model_and_optimizer, start
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from torch_join import Join

SAMPLES = 600
images, labels = digits(SAMPLES)


def is_dark(image: Tensor) -> bool:
    return float(image.mean()) > 0.3


class Stream(IterableDataset[tuple[int, Tensor, Tensor]]):
    """A rank's third of the images, of which those are left out that are not dark."""

    def __init__(self, rank: int) -> None:
        by_darkness = images.mean(dim=1).argsort().tolist()
        share = SAMPLES // WORLD_SIZE
        self.ids = by_darkness[rank * share : (rank + 1) * share]

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for i in self.ids:
            if is_dark(images[i]):
                yield i, images[i], labels[i]


def work(rank: int) -> None:
    network, optimizer = model_and_optimizer()
    ddp, loader = DistributedDataParallel(network), DataLoader(Stream(rank), BATCH_SIZE)
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    with Join([ddp, optimizer], weighting="samples") as join:
        for epoch in range(EPOCHS):
            for ids, inputs, targets in join.batches(loader):
                optimizer.zero_grad()
                cross_entropy(ddp(inputs), targets).backward()
                optimizer.step()
                trained[epoch].append(ids.tolist())
    check_digits(trained, network, [i for i in range(SAMPLES) if is_dark(images[i])])


if __name__ == "__main__":
    start(work)
