"""What a loop over `join_batches` that was left by `break` keeps."""

import gc
import weakref

import torch

from tests.support.accelerated import accelerator_of


def test_a_single_process_keeps_no_accelerator_of_a_loop_that_was_left() -> None:
    with accelerator_of(0) as accelerator:
        for _ in accelerator.join_batches([torch.zeros(1)] * 3):
            break
        watched = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert watched() is None
