"""Count the inputs of all ranks with a `Joinable` of one's own, as PyTorch's tutorial on Join does.

    python examples/custom_joinable.py

Nothing in `Counter` and its hook knows of torch_join: they work in torch's `Join` too.
"""

import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_join import Join

LENGTHS = (5, 3, 0)  # inputs by rank


class Counter(Joinable):
    """Counts, with one all-reduce per input, the inputs that all ranks have had."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.int64)

    def __call__(self) -> None:
        # Before the collectives of a step: joined ranks then run `main_hook`.
        TorchJoin.notify_join_context(self)
        ones = torch.ones((), dtype=torch.int64)
        dist.all_reduce(ones)
        self.total += ones

    def join_hook(self, **_: Any) -> JoinHook:
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class CounterHook(JoinHook):
    """What a rank without inputs does for the others, and what all do in the end."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros((), dtype=torch.int64))

    def post_hook(self, is_last_joiner: bool) -> None:
        # The last one to join has counted everything; several may have joined last.
        total = self.counter.total if is_last_joiner else torch.zeros_like(self.counter.total)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        self.counter.total = total


def work(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(LENGTHS))
    counter = Counter()
    with Join([counter]) as join:
        for _ in join.batches(range(LENGTHS[rank])):
            counter()
        seen = int(counter.total)
    # A rank counts while it has inputs itself; `post_hook` then gives all of them the whole.
    assert seen == sum(min(length, LENGTHS[rank]) for length in LENGTHS), seen
    assert int(counter.total) == sum(LENGTHS), int(counter.total)
    # One write per line, since the ranks print at the same time.
    print(f"Rank {rank}: {LENGTHS[rank]} inputs, {seen} counted in the loop, {int(counter.total)} in all\n", end="")
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # ends the group's threads, which cycles keep: they must not outlive the interpreter


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"file://{folder}/rendezvous",), nprocs=len(LENGTHS))


if __name__ == "__main__":
    main()
