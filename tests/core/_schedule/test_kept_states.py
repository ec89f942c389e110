"""A place in a loader that was read ahead, whose state is kept now and then only."""

import copy
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_join.integration import Position

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's


def loader() -> Any:
    return StatefulDataLoader(torch.arange(20), 2, shuffle=True, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("taken", [4, 5, 6, 7])
def test_what_was_not_trained_on_comes_again(every: int, taken: int) -> None:
    position, whole = Position(loader(), ahead=every), [*map(str, loader())]
    for read in range(7):
        position.keep(read, taken=max(0, read - 3))
        assert str(next(position.iterator)) == whole[read]
    place = {**copy.deepcopy(position.place(taken, 7, ended=False)), "left": False, "plan": None}
    resumed = Position(loader(), place, ahead=every)
    assert [*map(str, resumed.iterator)] == whole[taken:]
