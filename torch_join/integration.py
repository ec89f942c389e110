"""The API for framework adapters, in addition to the public names of `torch_join`; users do not need it.

It changes along with the packages of this repository, which are released together.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable

from torch_join import own_loops
from torch_join._base.attributes import setting
from torch_join._base.devices import use_device
from torch_join._base.errors import name_ranks
from torch_join._base.hyperparameters import group_options, take_group_options
from torch_join._base.names import check_names, naming_missing
from torch_join._base.sampler import Dealt, dealt, dealt_again
from torch_join._base.weighting import Count, factor_of_count
from torch_join._collectives.gather_active import join_rows
from torch_join._compat.ddp import is_communication_error
from torch_join._compat.operators import in_backward
from torch_join._control.channel import Channel
from torch_join._control.codec import closed, is_closed
from torch_join._control.failures import telling_failures
from torch_join._control.rendezvous import open_channel
from torch_join._handover.audit import Often
from torch_join._handover.mirror import Changes, StepMirror
from torch_join._handover.objects import gather as gather_objects
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.evened import Beginning, Evened, EvenedLoader, broadcast, length_of
from torch_join._lockstep.lockstep_join import LockstepJoin
from torch_join._lockstep.placeholder_lockstep import PlaceholderLockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._monitor.monitor import check_monitored
from torch_join._monitor.records import EpochRecord, RankRecord, Stopwatch
from torch_join._participants._metrics.module_metrics import ModuleMetrics
from torch_join._participants.arguments import listed, refuse_misspelt
from torch_join._participants.hook import Hook
from torch_join._participants.kinds import holds_parts, is_engine, is_sharded_model
from torch_join._participants.options import (
    JoinOptions,
    Options,
    by_old_name,
    renamed,
    showing_options,
    warn_renamed,
    whole_signature,
)
from torch_join._participants.participant import Driver, Participant
from torch_join._participants.ray import runs_in_ray
from torch_join._schedule.active_ranks import ReadStep
from torch_join._schedule.deals import Deal, Dealer, dealer_of, in_turn
from torch_join._schedule.drawing import draws_globally, global_kept, has_epoch, keeps_place, set_own, told_epochs
from torch_join._schedule.placeholders import Placeholder, make_placeholder, without_rows
from torch_join._schedule.plan import steps_of
from torch_join._schedule.positions import LoaderPlace, Order, Position, place_of_state
from torch_join._schedule.rebalancing import Rebalancing
from torch_join._schedule.stateful import SideBySide, forget_states, resumed_at, sampler_of
from torch_join._shadow.model_shadow import ModelShadow
from torch_join._shadow.reach import leads_to
from torch_join._tail.exchanges import StopSignals
from torch_join._tail.loop import LoopDriver
from torch_join._tail.reader import Begin, Reader, draws_exactly, is_length_certain, refuse_position
from torch_join._tail.refills import RefillGuard
from torch_join._tail.resuming import VERSION, Resuming, state_of
from torch_join.gather_in_order import gather_given, gather_in_order
from torch_join.join import Join
from torch_join.rows_file import FileRows, RowsPart, read_rows

# fmt: off
__all__ = [
    "VERSION", "Begin", "Beginning", "Changes", "Channel", "Count", "Deal", "Dealer", "Dealt", "Driver",
    "EpochRecord", "Evened", "EvenedLoader", "FileRows", "Hook", "JoinOptions", "LoaderPlace", "Lockstep",
    "LockstepJoin", "LoopDriver", "ModelShadow", "ModuleMetrics", "Often", "Options", "Order", "Participant",
    "Placeholder", "PlaceholderLockstep", "Position", "RankRecord", "ReadStep", "Reader", "Rebalancing",
    "RefillGuard", "Resuming", "RowsPart", "SideBySide", "StepDriver", "StepMirror", "StopSignals", "Stopwatch",
    "broadcast", "by_old_name", "check_monitored", "check_names", "closed", "dealer_of", "dealt", "dealt_again",
    "draws_exactly", "draws_globally", "driver_of", "factor_of_count", "follow_sharded_model", "forget_states",
    "gather_given", "gather_in_order", "gather_objects", "global_kept", "group_options", "has_epoch", "holds_parts",
    "in_backward", "in_turn", "is_closed", "is_communication_error", "is_engine", "is_length_certain",
    "is_sharded_model", "join_rows", "join_with", "keeps_place", "leads_to", "length_of", "listed",
    "make_placeholder", "name_ranks", "naming_missing", "open_channel", "own_loops", "place_of_state", "read_rows",
    "refuse_misspelt", "refuse_position", "renamed", "resumed_at", "runs_in_ray", "sampler_of", "set_own",
    "setting", "sharded_lockstep_join", "showing_options", "state_of", "steps_of", "take_group_options",
    "telling_failures", "told_epochs", "use_device", "warn_renamed", "whole_signature", "without_rows",
]
# fmt: on


def sharded_lockstep_join(driver: StepDriver, model: nn.Module, joinables: Sequence[Joinable] = ()) -> Lockstep:
    """Return the `Lockstep` for a DeepSpeed engine, or for a model that FSDP shards."""
    if is_engine(model):
        from torch_join._lockstep.engine import EngineLockstepJoin  # DeepSpeed takes long to import

        return EngineLockstepJoin(driver, model, joinables)
    from torch_join._lockstep.sharded import ShardedLockstepJoin  # FSDP takes long to import

    return ShardedLockstepJoin(driver, model, joinables)


def follow_sharded_model(driver: StepDriver, model: nn.Module) -> Participant:
    """Make joined ranks take part in the gathers that DeepSpeed or FSDP runs for `model` in evaluation steps."""
    if is_engine(model):
        from torch_join._lockstep.engine import LockstepEngineParticipant

        return driver.add(partial(LockstepEngineParticipant, engine=model))
    from torch_join._lockstep.sharded import LockstepShardedParticipant

    return driver.add(partial(LockstepShardedParticipant, model=model))


def driver_of(join: Join) -> LoopDriver:
    """Return the driver of a `Join`, whose operations are for adapters only."""
    return join._driver


def join_with(options: Options, joinables: Sequence[Any]) -> Join:
    """Return a `Join` with these joinables and options."""
    join = Join.__new__(Join)
    join._use(joinables, options)
    return join
