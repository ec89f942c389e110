"""Train a tiny GPT with Lightning Fabric on streams of text of unequal length, and save it at the end of each epoch.

    python examples/fabric_gpt.py   # starts two processes

Nobody knows how many batches a stream has. Ends with the largest difference of the parameters, also of the
last checkpoint's, from those of one process.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from lightning_join.fabric import DDPJoinStrategy

WORLD_SIZE, EPOCHS, CONTEXT, WIDTH = 2, 3, 16, 16
TEXTS = ("a rank that has run out of batches stays in step " * 4, "until the last one is done " * 13)
LETTERS = sorted({*"".join(TEXTS)})
TOLERANCE = 1e-10


class Stream(IterableDataset[Tensor]):
    """The windows of a text, each with the letter that comes after it."""

    def __init__(self, text: str) -> None:
        self.letters = torch.tensor([LETTERS.index(letter) for letter in text])

    def __iter__(self) -> Iterator[Tensor]:
        for begin in range(0, len(self.letters) - CONTEXT - 1, CONTEXT):
            yield self.letters[begin : begin + CONTEXT + 1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def gpt() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT().double()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def loader_of(rank: int) -> DataLoader[Tensor]:
    return DataLoader(Stream(TEXTS[rank]), batch_size=2)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=DDPJoinStrategy(weighting="samples"))
    fabric.launch()
    network, adam = gpt()
    model, optimizer = fabric.setup(network, adam)
    loader = fabric.setup_dataloaders(loader_of(fabric.global_rank))
    folder = Path(fabric.broadcast(tempfile.mkdtemp()))
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if fabric.strategy.at_last_step:  # rank 0 has run out of its text by then
                fabric.save(folder / f"{epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
                fabric.print(
                    f"Epoch {epoch}: loss {fabric.all_reduce(loss.detach()):.3f}, ranks {fabric.strategy.active_ranks}"
                )

    reference, adam = gpt()
    for _ in range(EPOCHS):
        iterators = [iter(loader_of(rank)) for rank in range(WORLD_SIZE)]
        while batches := [batch for iterator in iterators if (batch := next(iterator, None)) is not None]:
            for batch in batches:
                (loss_of(reference, batch) * len(batch) / sum(map(len, batches))).backward()
            adam.step()
            adam.zero_grad()
    saved = fabric.load(folder / f"{EPOCHS - 1}.ckpt")["model"]
    pairs = [(network.state_dict()[name], saved[name], value) for name, value in reference.state_dict().items()]
    difference = float(fabric.all_gather(max((one - two).abs().max() for a, b, two in pairs for one in (a, b))).max())
    fabric.print(f"Largest difference of a parameter from one process on the same schedule: {difference:.1e}")
    if not difference <= TOLERANCE:
        sys.exit(f"The parameters differ from those of one process by more than {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
