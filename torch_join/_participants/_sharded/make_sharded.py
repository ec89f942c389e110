"""The participants for sharded models and the objects that belong to them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_join._base.errors import UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._participants._sharded.clipping import ClippingParticipant
from torch_join._participants._sharded.sharded_model import ShardedModelParticipant
from torch_join._participants._sharded.sharded_step import ShardedScalerParticipant, ShardedStepParticipant
from torch_join._participants.clears import innermost_optimizer
from torch_join._participants.kinds import holds_shards, is_sharded_model
from torch_join._participants.participant import Driver, Participant


def make_sharded_participants(driver: Driver, joinables: Sequence[Any]) -> list[Participant]:
    """Return the participants for the sharded objects among `joinables`, which come before all other participants.

    Raises:
        UnsupportedError: Joined ranks cannot follow a sharded object.
    """
    _refuse_copies(joinables)
    found = [thing for thing in joinables if is_sharded_model(thing)]
    models = [ShardedModelParticipant(driver, index, model) for index, model in enumerate(found)]
    participants: list[Participant] = [*models]
    optimizers = []
    for thing in joinables:
        if (optimizer := innermost_optimizer(thing)) is not None and holds_shards(optimizer):
            if not models:
                raise UnsupportedError(
                    f"{type(thing).__name__} steps sharded parameters, but no sharded model was passed to Join. Pass"
                    " the model before the optimizer: Join([model, optimizer])."
                )
            optimizers.append(optimizer)
            participants.append(ShardedStepParticipant(driver, len(participants), optimizer, models))
        elif isinstance(thing, torch.amp.GradScaler) and models:
            participants.append(ShardedScalerParticipant(driver, len(participants), thing, optimizers, models))
    return [*participants, ClippingParticipant(driver, len(participants), models)] if models else participants


def _refuse_copies(joinables: Sequence[Any]) -> None:
    for thing in joinables:
        if not (isinstance(thing, nn.Module) and holds_shards(thing)):
            continue
        is_average, by_others = isinstance(thing, AveragedModel), not is_sharded_model(thing)
        if by_others and not is_average and any(_compat.is_shard(p) and p.requires_grad for p in thing.parameters()):
            raise UnsupportedError(
                f"{type(thing).__name__} is sharded only by tensor parallelism: all ranks of a group compute each"
                " batch together, so they cannot have uneven inputs. Train without Join, or also apply fully_shard"
                " over a data-parallel dimension, whose ranks may be uneven."
            )
        if by_others or is_average:
            raise UnsupportedError(
                f"{type(thing).__name__} holds sharded parameters that are not trained (like an AveragedModel), and"
                " finished ranks would not update their part of them. Do not pass it to Join, and update it after the"
                " loop, on all ranks."
            )
