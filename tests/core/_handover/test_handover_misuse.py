"""Misuse of the handover, and the checksum of what it covers."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core._handover.states import Holder, mlp
from tests.emulator import place
from tests.support.inside import checksum
from tests.support.workers import Workers
from torch_join import JoinTypeError, JoinValueError
from torch_join._handover.handover import hand_over
from torch_join.integration import Channel, open_channel


def misuse(rank: int, what: str) -> None:
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    objects: list[Any] = [model, optimizer]
    source = 1
    if what == "unknown":
        objects.append(3)
    elif what == "source":
        source = rank
    elif what == "no such source":
        source = 5
    elif what == "unpicklable":
        objects.append(Holder(threading.Lock()))
    elif what == "reference":
        objects.append(Holder(Counter({optimizer: 1})))
    elif what == "meta":
        objects.append(nn.Linear(1, 1, device="meta"))
    elif what == "lazy":
        objects.append(nn.LazyLinear(2))
    elif rank == 0 and what == "unknown on one":
        objects.append("text")
    elif rank == 0 and what == "fewer":
        objects.pop()
    elif rank == 0 and what == "other kind":
        objects[1] = torch.optim.Adam(model.parameters())
    elif rank == 0 and what == "shape":
        objects[0] = nn.Linear(2, 3)
    elif rank == 0 and what == "names":
        objects[0] = nn.Linear(2, 2, bias=False)
    elif rank == 0 and what == "groups":
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    elif what == "scaler":
        objects.append(torch.amp.GradScaler(place().type, enabled=rank == 0))
    elif what == "no counterpart":
        objects.append(Holder(model if rank == 1 else ()))
    before = checksum([model, optimizer])
    channel = open_channel()
    dist.barrier()  # nobody leaves, with the store, while another is still on its way to it
    try:
        hand_over(objects, source, channel)
    finally:
        assert checksum([model, optimizer]) == before


MISUSE = {
    "unknown": "JoinTypeError: Ranks 0, 1, 2: A int has no state to hand over. Pass a model (torch.nn.Module,",
    "unknown on one": "JoinTypeError: Rank 0: A str has no state to hand over.",
    "source": "JoinValueError: The ranks passed different source ranks: Rank 0 said 0;",
    "no such source": "JoinValueError: The source rank must be between 0 and 2, not 5.",
    "unpicklable": "JoinTypeError: Rank 1: other 0 (Holder).state_dict()['value'] is a lock that cannot be",
    "reference": "JoinTypeError: Rank 1: other 0 (Holder).state_dict()['value'] refers to a SGD, which cannot be sent.",
    "meta": "JoinTypeError: Rank 1: model 1 (Linear): weight cannot be handed over: it is on the meta device.",
    "lazy": "JoinTypeError: Rank 1: model 1 (LazyLinear): weight cannot be handed over: it is not initialized",
    "fewer": "JoinValueError: The ranks passed different objects: Rank 0 gave [Linear]; Ranks 1, 2 gave [Linear, SGD].",
    "other kind": "JoinValueError: The ranks passed different objects: Rank 0 gave [Linear, Adam]; Ranks 1, 2 gave [Li",
    "shape": "JoinValueError: Rank 0: model 0 (Linear): weight is float32[3, 2] on {} here and float32[2, 2]",
    "names": "JoinValueError: Rank 0: model 0 (Linear) has different parameters here and on the source",
    "groups": "JoinValueError: Rank 0: optimizer 0 (SGD) has groups of [2, 1] parameters here",
    "scaler": "JoinValueError: Rank 0: GradScaler 0 (GradScaler) is enabled on only one of this rank",
    "no counterpart": "JoinValueError: Ranks 0, 2: other 0 (Holder).state_dict()['value'] is a Linear on the source",
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_raises_the_same_on_every_rank_and_changes_nothing(workers: Workers, what: str) -> None:
    for outcome in workers.outcomes(3, misuse, what):
        assert outcome.error.startswith(MISUSE[what].replace("{}", workers.device)), outcome.trace


def test_a_world_of_one_is_only_checked() -> None:
    model = mlp()
    before = checksum([model])
    hand_over([model], 0, Channel())
    assert checksum([model]) == before
    with pytest.raises(JoinTypeError, match="A int has no state"):
        hand_over([3], 0, Channel())
    with pytest.raises(JoinValueError, match="between 0 and 0, not 1"):
        hand_over([], 1, Channel())
