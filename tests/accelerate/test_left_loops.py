"""What a loop over `join_batches` that was left by `break` keeps."""

import gc
import weakref

import torch
from torch.utils.data import DataLoader

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers


def test_a_single_process_keeps_no_accelerator_of_a_loop_that_was_left() -> None:
    with accelerator_of(0) as accelerator:
        for _ in accelerator.join_batches([torch.zeros(1)] * 3):
            break
        watched = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert watched() is None


def stop_after_a_word(rank: int) -> int:
    """The main process alone prints, and all leave their loops."""
    with accelerator_of(rank) as accelerator:
        net = torch.nn.Linear(3, 1)
        data = DataLoader(torch.ones(17, 3), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), data)
        with accelerator.join_uneven_inputs(rebalance=True):
            for step, batch in enumerate(loader):
                if step == 3:
                    if accelerator.is_main_process:
                        accelerator.print("enough")
                    break
                optimizer.zero_grad()
                accelerator.backward(model(batch).sum())
                optimizer.step()
    return step


def test_all_processes_may_leave_a_rebalanced_loop_of_which_one_tells_more(workers: Workers) -> None:
    assert workers.run(2, stop_after_a_word) == [3, 3]


def train_twice(rank: int) -> list[int]:
    """Go through a loader of which each process reads a part, and through one of which the main process reads all."""
    counts = [0, 0]
    with accelerator_of(rank) as accelerator:
        net = torch.nn.Linear(3, 1)
        parts = DataLoader(torch.ones(17, 3), batch_size=2)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), parts)
        accelerator.dataloader_config.dispatch_batches = True
        whole = DataLoader(torch.ones(16, 3), batch_size=2)  # type: ignore[arg-type]
        with accelerator.join_uneven_inputs(rebalance=True):
            for turn, one in enumerate((loader, accelerator.prepare_data_loader(whole))):
                for batch in one:
                    optimizer.zero_grad()
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    counts[turn] += 1
    return counts


def test_a_loop_over_a_dispatched_loader_after_a_rebalanced_one_has_all_its_steps(workers: Workers) -> None:
    assert workers.run(2, train_twice) == [[5, 4], [4, 4]]
