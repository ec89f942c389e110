"""Read tar shards with WebDataset, in Accelerate.

    torchrun --nproc-per-node=3 examples/pipelines/webdataset_shards.py

`split_by_node` gives each process whole shards: of five, two processes read two and one reads one. The shards hold
different numbers of samples, too.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from accelerate.utils import broadcast_object_list
from one_process import BATCH_SIZE, EPOCHS, check_digits, digits, model_and_optimizer
from torch.nn.functional import cross_entropy

from accelerate_join import Accelerator

SHARDS = (range(100), range(100, 130), range(130, 220), range(220, 260), range(260, 261))  # the samples' ids


def write_shards(folder: Path) -> None:
    images, labels = digits()
    for number, ids in enumerate(SHARDS):
        with wds.TarWriter(str(folder / f"{number}.tar")) as tar:
            for i in ids:
                tar.write({"__key__": str(i), "image.npy": images[i].numpy(), "label.cls": int(labels[i])})


def loader_of(folder: str) -> Any:
    shards = f"{folder}/{{0..{len(SHARDS) - 1}}}.tar"
    stream = wds.WebDataset(shards, nodesplitter=wds.split_by_node, shardshuffle=False)
    return wds.WebLoader(stream.decode().to_tuple("__key__", "image.npy", "label.cls"), batch_size=BATCH_SIZE)


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        if accelerator.is_main_process:
            write_shards(Path(folder))
        shared = [folder]
        broadcast_object_list(shared)  # the main process's
        loader = loader_of(shared[0])
        network, optimizer = model_and_optimizer()
        model, optimizer = accelerator.prepare(network, optimizer)
        trained: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
        for epoch in range(EPOCHS):
            for keys, images, labels in accelerator.join_batches(loader, weighting="samples"):
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                trained[epoch].append([int(key) for key in keys])
        check_digits(trained, network, range(SHARDS[-1].stop))
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
