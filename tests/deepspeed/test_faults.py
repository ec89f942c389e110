"""A rank that raises in a tail, or is killed: the others name it."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.front_ends.deepspeed import TIMEOUT, Net, Recipe, deepspeed_of, engine_of
from tests.support.workers import Workers
from torch_join import Join, JoinError

LENGTHS = (1, 4, 4)
LATEST = 10.0  # seconds


class BrokenError(RuntimeError):
    pass


class SurvivorError(RuntimeError):
    """How a rank ends that another one's failure has ended."""


def break_at(rank: int, stage: int, where: str, how: str) -> None:
    """Have rank 2 fail in its third step, where rank 0 has run out of batches."""
    recipe = Recipe(LENGTHS, stage=stage)
    with deepspeed_of(rank) as deepspeed:
        net = Net()
        engine, scheduler = engine_of(deepspeed, recipe, net)
        failed_at = time.monotonic()

        def fail(*_: Any) -> None:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise BrokenError("on purpose")

        try:
            with Join([engine, scheduler], timeout=TIMEOUT) as join:
                for number, (x, y) in enumerate(join.batches(recipe.batches(rank))):
                    breaks = rank == 2 and number == 2
                    failed_at = time.monotonic()
                    hook = net.c.register_forward_hook(fail) if breaks and where == "forward" else None
                    loss = functional.mse_loss(engine(x), y)
                    if breaks and where == "backward":
                        loss.register_hook(fail)
                    engine.backward(loss)
                    if breaks and where == "step":
                        inner = torch.optim.Optimizer.register_step_pre_hook
                        inner(getattr(engine.optimizer, "optimizer", engine.optimizer), fail)
                    engine.step()
                    del hook
        except BrokenError:
            os._exit(1)  # as a process would that its exception ends
        except JoinError as error:
            raise SurvivorError(f"{time.monotonic() - failed_at:.1f} s: {error}") from error


@pytest.mark.parametrize(
    ("stage", "where", "how"),
    [
        (3, "forward", "raise"),
        (2, "backward", "raise"),
        (1, "step", "raise"),
        (2, "forward", "kill"),
        (3, "backward", "kill"),
        (3, "step", "kill"),
    ],
)
def test_a_rank_that_fails_is_named_on_all(workers: Workers, stage: int, where: str, how: str) -> None:
    outcomes = workers.outcomes(3, break_at, stage, where, how, deadline=90.0)
    for rank in (0, 1):
        text = outcomes[rank].error
        assert text.startswith("SurvivorError"), outcomes[rank].trace
        assert "Rank 2 failed" in text or "rank 2 did not answer" in text, text
        assert how == "kill" or "on purpose" in text, text
        assert float(text.split()[1]) < LATEST, text
