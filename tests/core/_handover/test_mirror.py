"""What a step's own code changes by hand is found by value, and named by place."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_join.integration import StepMirror


def test_what_was_changed_is_found_by_its_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    ddp: Any = SimpleNamespace(module=model, parameters_to_ignore={"1.weight"})
    mirror = StepMirror(ddp)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    mirror.remember()
    assert not mirror.changes(with_parameters=True)
    model[2].weight.data.clamp_(max=-1.0)  # leaves no version behind
    model[0].bias.data.add_(1.0)
    model[1].weight.data.zero_()  # DDP ignores it: it is each rank's own
    model[0].weight.grad = None
    model[1].bias.grad.zero_()
    model[2].bias.grad.mul_(2.0)
    changes = mirror.changes(with_parameters=True)
    assert (changes.parameters, changes.cleared, changes.zeroed, changes.gradients) == ([1, 3], [0], [2], [4])
    assert mirror.changes(with_parameters=True).parameters == []  # they are known now
