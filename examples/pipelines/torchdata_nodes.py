"""Read with `torchdata.nodes`, in a plain PyTorch loop: two sources of different sizes, mixed on each rank.

    python examples/pipelines/torchdata_nodes.py   # starts three processes

The sources' samples are dealt out to the ranks, and how many batches that makes is not the same on all of them.
"""

from typing import Any

import torchdata.nodes as tn
from one_process import BATCH_SIZE, EPOCHS, WORLD_SIZE, check_digits, digits, model_and_optimizer, start
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from torch_join import Join

SAMPLES = 290
images, labels = digits(SAMPLES)
SOURCES = {"first": range(200), "second": range(200, SAMPLES)}


def loader_of(rank: int) -> tn.Loader[Any]:
    sources = {name: tn.IterableWrapper(ids[rank::WORLD_SIZE]) for name, ids in SOURCES.items()}
    node: tn.BaseNode[Any] = tn.MultiNodeWeightedSampler(
        sources, {"first": 2.0, "second": 1.0}, stop_criteria=tn.StopCriteria.ALL_DATASETS_EXHAUSTED, seed=rank
    )
    node = tn.ParallelMapper(node, lambda i: (i, images[i], labels[i]), num_workers=2, method="thread")
    node = tn.Mapper(tn.Batcher(node, BATCH_SIZE, drop_last=False), default_collate)
    return tn.Loader(tn.Prefetcher(node, prefetch_factor=2))


def work(rank: int) -> None:
    network, optimizer = model_and_optimizer()
    ddp, loader = DistributedDataParallel(network), loader_of(rank)
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    with Join([ddp, optimizer], weighting="samples") as join:
        for epoch in range(EPOCHS):
            for ids, inputs, targets in join.batches(loader):
                optimizer.zero_grad()
                cross_entropy(ddp(inputs), targets).backward()
                optimizer.step()
                trained[epoch].append(ids.tolist())
    check_digits(trained, network, range(SAMPLES))


if __name__ == "__main__":
    start(work)
