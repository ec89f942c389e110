"""The participants for the objects passed to `Join`."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError
from torch_join._compat.optimizer_state import is_sharded
from torch_join._participants._metrics.metric import MetricParticipant
from torch_join._participants.checks import check_supported
from torch_join._participants.custom import CustomParticipant
from torch_join._participants.ddp_model import ModelParticipant
from torch_join._participants.kinds import holds_metrics, holds_shards, is_engine, of_engines
from torch_join._participants.participant import Driver, Participant
from torch_join._participants.ray import RayParticipant, Report, ReportParticipant, runs_in_ray
from torch_join._participants.unregistered_model import UnregisteredModelParticipant
from torch_join._participants.zero_optimizer import ShardedOptimizerParticipant


def make_participants(driver: Driver, joinables: Sequence[Any], options: dict[str, Any]) -> list[Participant]:
    """Return participants for those of `joinables` that act in a step; the others are only handed over.

    The last participants watch for models that were not passed to `Join`, and for calls of Ray Train.

    Raises:
        JoinTypeError: A joinable has a type that cannot take part.
        UnsupportedError: A joinable cannot be trained exactly.
    """
    participants: list[Participant] = []
    engines = of_engines(joinables)
    sharded = {id(thing) for thing in joinables if holds_shards(thing)}
    if sharded:
        # Importing FSDP takes long.
        from torch_join._participants._sharded.make_sharded import make_sharded_participants

        participants += make_sharded_participants(driver, joinables)
    for thing in joinables:
        if id(thing) in sharded:
            continue
        if is_engine(thing):
            # Importing DeepSpeed takes long.
            from torch_join._participants._deepspeed.loop_engine import LoopEngineParticipant

            participants.append(LoopEngineParticipant(driver, len(participants), thing))
        if id(thing) in engines:
            continue
        check_supported(thing, joinables)
        if isinstance(thing, DistributedDataParallel):
            participants.append(ModelParticipant(driver, len(participants), thing))
        elif is_sharded(thing):
            participants.append(ShardedOptimizerParticipant(driver, len(participants), thing))
        elif isinstance(thing, Joinable):
            participants.append(custom_participant(driver, len(participants), thing, options))
        elif holds_metrics(thing):
            participants.append(MetricParticipant(driver, len(participants), thing))
        elif not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise JoinTypeError(
                f"Join takes DDP models, optimizers, schedulers, torch Joinables and anything with state_dict and"
                f" load_state_dict, not {type(thing).__name__}."
            )
    participants.append(UnregisteredModelParticipant(driver, len(participants), joinables))
    if runs_in_ray():
        participants.append(RayParticipant(driver, len(participants)))
    return participants


def custom_participant(
    driver: Driver, index: int, joinable: Joinable, options: dict[str, Any]
) -> CustomParticipant | ReportParticipant:
    """Return the participant of a joinable that is neither a DDP model nor a sharded optimizer."""
    if isinstance(joinable, Report):
        return ReportParticipant(driver, index, joinable)
    return CustomParticipant(driver, index, joinable, options)
