"""Stream a dataset that LitData has optimized, in Fabric.

    python examples/pipelines/litdata_stream.py   # starts three processes

In a distributed run LitData leaves out samples until all ranks have as many, unless it is told `drop_last=False`.
"""

import tempfile
from typing import Any

import torch
from lightning.fabric import Fabric
from litdata import StreamingDataLoader, StreamingDataset, optimize
from one_process import BATCH_SIZE, EPOCHS, WORLD_SIZE, check_digits, digits, model_and_optimizer
from torch.nn.functional import cross_entropy

from lightning_join.fabric import DDPJoinStrategy

SAMPLES = 3 * 5 * BATCH_SIZE + 1
images, labels = digits(SAMPLES)


def sample(i: int) -> dict[str, Any]:
    return {"id": i, "image": images[i], "label": labels[i]}


def main() -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=DDPJoinStrategy(weighting="samples"))
    fabric.launch()
    folder = fabric.broadcast(tempfile.mkdtemp())
    with fabric.rank_zero_first():
        if fabric.is_global_zero:
            optimize(sample, inputs=list(range(SAMPLES)), output_dir=folder, chunk_size=50, num_workers=1)
    stream = StreamingDataset(folder, shuffle=True, drop_last=False)
    network, optimizer = model_and_optimizer()
    model, optimizer = fabric.setup(network, optimizer)
    loader = fabric.setup_dataloaders(StreamingDataLoader(stream, batch_size=BATCH_SIZE), use_distributed_sampler=False)
    trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    for epoch in range(EPOCHS):
        for batch in loader:
            fabric.backward(cross_entropy(model(batch["image"]), batch["label"]))
            optimizer.step()
            optimizer.zero_grad()
            trained[epoch].append(batch["id"].tolist())
    check_digits(trained, network, range(SAMPLES))


if __name__ == "__main__":
    main()
