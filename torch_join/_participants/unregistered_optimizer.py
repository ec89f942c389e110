"""Optimizers and LR schedulers that a tail needs and that were not given to `Join`: a warning.

A joined rank does not run the user's code, so what is not handed over to it goes stale without a word: the
next epoch's updates differ between the ranks. Active ranks notice by a hook on the steps of all
optimizers, which is there in the tail only, so that even inputs pay nothing.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast
from weakref import WeakSet

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_join._handover.optimizers import has_groups, wrapped_optimizers
from torch_join._participants.hook import untraced
from torch_join._participants.kinds import is_engine
from torch_join._participants.participant import Driver, LoopModel, Participant

_HOLD = ("optimizer", "optim")  # in which a wrapper holds an optimizer
_warned: WeakSet[Any] = WeakSet()  # the optimizers that there has been a warning about, in this process


class UnregisteredOptimizerParticipant(Participant):
    """Warns of what was not given, once per optimizer.

    An optimizer that steps parameters of a given model and has a state warns at its first step in a tail.
    One without a state (SGD without momentum) has nothing that could go stale but its hyperparameters, and
    warns at the end of a tail in which they changed. So does one that was given, if it has an LR scheduler
    and that was not.

    Limits:
        A scheduler that changes no learning rate in the tail is not noticed, nor are optimizers that do
        not derive from `torch.optim.Optimizer`. What a given object holds in an attribute counts as given.
    """

    def __init__(self, driver: Driver, index: int, joinables: Sequence[Any]) -> None:
        super().__init__(driver, index)
        self._joinables = joinables
        self._given: dict[int, Any] = {}  # optimizers, by identity
        self._scheduled: set[int] = set()  # the parameter groups whose scheduler was given
        self._parameters: set[int] = set()
        self._rates: dict[int, tuple[Any, list[float]]] = {}  # optimizers to look at again, and what they had

    def enter_tail(self) -> None:
        self._given.clear()
        for thing in self._joinables:
            self._take(thing)
        models = [cast(LoopModel, each).modules[0] for each in self.tail_log.participants if each.is_model]
        self._parameters = {id(p) for model in models for p in model.parameters() if p.requires_grad}
        wrapped = {
            id(inner) for optimizer in self._given.values() for inner in wrapped_optimizers(optimizer, *_HOLD)[1:]
        }
        for key, optimizer in self._given.items():
            groups = optimizer.param_groups
            has_scheduler = any("initial_lr" in group for group in groups)
            if has_scheduler and key not in wrapped and not any(id(group) in self._scheduled for group in groups):
                self._rates[key] = optimizer, _rates(optimizer)
        self._undo.append(register_optimizer_step_post_hook(untraced(self._after_step)).remove)
        self._undo.append(self._rates.clear)

    def leave_tail(self) -> None:
        changed = [optimizer for optimizer, rates in self._rates.values() if _rates(optimizer) != rates]
        self.exit()
        for optimizer in changed:
            self._warn_of_rate(optimizer)

    def _take(self, thing: Any) -> None:
        if _is_scheduler(thing):
            self._scheduled.update(id(group) for optimizer in _scheduled_by(thing) for group in optimizer.param_groups)
            return
        if is_engine(thing):
            self._take(thing.optimizer)
            self._take(thing.lr_scheduler)
        if isinstance(thing, nn.Module) or id(thing) in self._given:
            return  # a module's state is its tensors
        if has_groups(thing):
            self._given[id(thing)] = thing
        for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if has_groups(one) or _is_scheduler(one):
                    self._take(one)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) in self._given or optimizer in _warned or self.members.serves:
            return
        steps = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._parameters
        if not steps:
            return
        if not any(optimizer.state.values()):
            self._rates.setdefault(id(optimizer), (optimizer, _rates(optimizer)))
            return
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} steps {len(steps)} of the {len(self._parameters)} parameters of what was given"
            f" to Join, but was not itself given to it. Ranks {self.members.joined_names} have joined and do not step"
            " it, so its state goes stale there, and from the next epoch on the ranks drift apart. Give it to Join too:"
            " Join([model, optimizer, ...]).",
            stacklevel=3,
        )

    def _warn_of_rate(self, optimizer: Any) -> None:
        if optimizer in _warned:
            return
        _warned.add(optimizer)
        given = id(optimizer) in self._given
        name = type(optimizer).__name__
        warnings.warn(
            f"The learning rate of {name} changed while some ranks had joined, and "
            + (
                "its LR scheduler was not given to Join: joined ranks get the rate, but their scheduler counts on from"
                " where it was, so from the next step on the ranks disagree. Give the scheduler to Join too:"
                if given
                else f"{name} was not given to Join: joined ranks keep the old one. Give it to Join too, and its"
                " scheduler:"
            )
            + " Join([model, optimizer, scheduler]).",
            stacklevel=2,
        )


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _is_scheduler(thing: Any) -> bool:
    """Whether `thing` is an LR scheduler, of torch or something like it (timm's, Accelerate's)."""
    has_optimizer = hasattr(thing, "optimizer") or hasattr(thing, "optimizers")
    return has_optimizer and callable(getattr(thing, "step", None)) and not hasattr(thing, "zero_grad")


def _scheduled_by(scheduler: Any) -> Iterator[Any]:
    """Yield the optimizers of a scheduler and of the one that it wraps, if it does."""
    inner = getattr(scheduler, "scheduler", None)
    if inner is not scheduler and _is_scheduler(inner):
        yield from _scheduled_by(inner)
    for optimizer in (getattr(scheduler, "optimizer", None), *getattr(scheduler, "optimizers", ())):
        yield from wrapped_optimizers(optimizer, *_HOLD)
