"""What an engine costs on even inputs: no collective, and no message, that a plain engine has not."""

import sys
from typing import Any

import pytest
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.calls import Calls
from tests.support.front_ends.deepspeed import TIMEOUT, Net, Recipe, deepspeed_of, engine_of
from tests.support.workers import Workers
from torch_join import Join


class Collectives(TorchDispatchMode):
    """Keeps the names of the `c10d` operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


def count(rank: int, stage: int, joins: bool) -> tuple[list[list[str]], list[int]]:
    """Return the collectives of each step, and how often the ranks exchanged something else in it."""
    recipe = Recipe((6, 6), stage=stage)
    with deepspeed_of(rank) as deepspeed:
        net = Net()
        engine, _ = engine_of(deepspeed, recipe, net)
        steps: list[list[str]] = []
        exchanges, calls = [], Calls()
        with Join([engine], enable=joins, timeout=TIMEOUT) as join:
            for x, y in join.batches(recipe.batches(rank)):
                sys.setprofile(calls)
                with Collectives() as collectives:
                    engine.backward(functional.mse_loss(engine(x), y))
                    engine.step()
                steps.append(collectives.seen)
                exchanges.append(calls.take()[1])  # from a step's begin to the next one's
            sys.setprofile(None)
        return steps, exchanges


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_even_step_is_a_plain_engines(workers: Workers, stage: int) -> None:
    plain = workers.run(2, count, stage, False, deadline=60.0)
    joining = workers.run(2, count, stage, True, deadline=60.0)
    for (theirs, _), (ours, exchanges) in zip(plain, joining, strict=True):
        assert any(theirs)
        assert ours == theirs
        assert exchanges[1:-1] == [0] * (len(exchanges) - 2)
