"""Checks of the arguments of `Join`, before they are used."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import product
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torch_join._base.errors import JoinTypeError, JoinValueError
from torch_join._compat.optimizer_state import is_sharded
from torch_join._participants.options import TORCHS, Options

_all = [*(one.name for one in fields(Options) if one.name != "hooks"), TORCHS]  # the arguments of `Join`


def listed(joinables: Any) -> list[Any]:
    """Return `joinables` as a list.

    Raises:
        JoinTypeError: `joinables` is a single object, such as a model, and not a sequence.
    """
    # Some modules are iterable, and yield their layers.
    if isinstance(joinables, (nn.Module, str, Mapping)) or not isinstance(joinables, Iterable):
        raise JoinTypeError(
            f"joinables must be a list, not a {type(joinables).__name__}. Pass [model, optimizer, scheduler], in the"
            " same order on every rank."
        )
    return list(joinables)


def check_given(joinables: Sequence[Any]) -> None:
    """Raise if there is no joinable, or an object that cannot be one.

    Raises:
        JoinValueError: `joinables` is empty.
        JoinTypeError: A loader or a mock is among them.
    """
    if not joinables:
        raise JoinValueError(
            "The join context manager requires at least one joinable: pass the objects that change in the loop, such as"
            " [model, optimizer, scheduler]."
        )
    if any(isinstance(thing, DataLoader) for thing in joinables):
        raise JoinTypeError(
            "The list of joinables contains a loader, but takes only objects that are the same on all ranks, such as"
            " models and optimizers. Remove the loader, and iterate over it with `for batch in join.batches(loader)`."
        )
    for thing in joinables:
        if getattr(thing, "no_object_has_this_attribute", None) is not None:
            raise JoinTypeError(
                f"The list of joinables contains a {type(thing).__name__}, which has every attribute (like a mock),"
                " so Join cannot tell what it is. Pass a real model or optimizer, or remove it."
            )


def check_options(options: Mapping[str, Any], joinables: Sequence[Any]) -> None:
    """Raise for options that no hook would use.

    Args:
        options: The keyword arguments that go to every `join_hook`.
        joinables: The joinables.

    Raises:
        JoinTypeError: No hook takes an option; or a hook takes any option, but the name looks like a misspelt argument
            of `Join`.
    """
    found: list[Any] = [thing for thing in joinables if isinstance(thing, Joinable)]
    custom = [thing for thing in found if not (isinstance(thing, DistributedDataParallel) or is_sharded(thing))]
    hooks = [inspect.signature(thing.join_hook).parameters.values() for thing in custom]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for hook in hooks for parameter in hook)
    named = {parameter.name for hook in hooks for parameter in hook}
    for name in options.keys() - named - {TORCHS}:
        refuse_misspelt(name)
        if not takes_any:
            for meant in get_close_matches(name, _all, 1, cutoff=0.8):
                raise _misspelt("Join", name, meant)
            raise JoinTypeError(
                f"Join has no argument {name!r}, and no joinable has a hook that takes it. Remove it; the arguments"
                f" are {', '.join(_all)}."
            )


def refuse_misspelt(*names: str, owner: str = "Join", options: Sequence[str] = _all, also: Sequence[str] = ()) -> None:
    """Raise if a name looks like a misspelt option: a function that accepts any name would ignore it.

    Args:
        names: The names that a user gave.
        owner: The name of the class or function that has the options.
        options: The options of `owner`; by default, those of `Join`.
        also: Further options.

    Raises:
        JoinTypeError: A name looks like an option.
    """
    options = [*options, *also]
    for name, own in product({*names}.difference(options), options):
        if _is_slip(name, own):
            raise _misspelt(owner, name, own)


def _is_slip(name: str, own: str) -> bool:
    """Whether `name` is `own` with two letters swapped, or with one letter changed, missing or added.

    Different words do not count, since a user's hook may take them: `enabled`, `timeouts`, `audio`.
    """
    shorter = min(len(name), len(own))
    begin = next((i for i in range(shorter) if name[i] != own[i]), shorter)
    rest, right = name[begin:], own[begin:]
    return (
        (rest[:2] == right[1::-1] and rest[2:] == right[2:])
        or (rest[1:] == right[1:] and len(rest) == len(right) and len(own) > len("audit"))
        or rest == right[1:]
        or (rest[1:] == right and right != "")
    )


def _misspelt(owner: str, name: str, meant: str) -> JoinTypeError:
    return JoinTypeError(f"{owner} has no argument {name!r}. Did you mean {meant!r}?")


def common_group(joinables: Sequence[Any]) -> Any:
    """Return the common process group of joinables; this package's joinables count only if the user passed a group.

    Raises:
        JoinValueError: Their process groups differ.
    """
    groups = [j.join_process_group for j in joinables if isinstance(j, Joinable) and getattr(j, "has_group", True)]
    if any(group != groups[0] for group in groups):
        raise JoinValueError("Using join context manager with multiple process groups")
    return groups[0] if groups else dist.group.WORLD
