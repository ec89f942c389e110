"""Repeats changes that user code makes to gradients and parameters, on ranks that do not run that code.

If a step clears, clips or replaces gradients by hand, or changes parameters outside the optimizer (weight clipping, a
target network), the single changes cannot be announced. So an active rank compares gradients and parameters with the
values that all ranks had, and the lowest active rank sends the changed ones.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.devices import read
from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._control.codec import closed
from torch_join._handover.digest import unread_checksums

Known = tuple["weakref.ref[Tensor]", tuple[int, int]] | None  # a gradient, and its versions at some moment


@closed("changes")
@dataclass(frozen=True)
class Changes:
    """The places, in the order of the model's parameters, of values that a step changed by hand."""

    cleared: list[int]  # gradients that are now `None`
    zeroed: list[int]
    gradients: list[int]
    parameters: list[int]

    def __bool__(self) -> bool:
        return any((self.cleared, self.zeroed, self.gradients, self.parameters))


class StepMirror:
    """One rank's record of the gradients and parameters that are equal on all ranks.

    Args:
        ddp: The model.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        named = ddp.module.named_parameters()
        self._parameters = [p for name, p in named if name not in ddp.parameters_to_ignore]
        self._places = {id(p): place for place, p in enumerate(self._parameters)}
        self._gradients: list[Known] = []
        self._sums: list[tuple[list[int], Tensor]] = []
        self._local: set[int] = set()  # gradients that were accumulated without a sync: each rank has its own

    def remember(self) -> None:
        """Record the current values, which are equal on all ranks."""
        self._remember_gradients()
        self._sums = self._checksums()

    def before_tail(self, synced: bool) -> None:
        """Record that a backward has run while all ranks are active."""
        self._local = set() if synced else set(range(len(self._parameters)))

    def after_backward(self, synced: bool) -> None:
        """Record that a backward has run on all ranks; without a sync, each rank has its own gradients from it."""
        touched = {i for i, p in enumerate(self._parameters) if not is_known(p.grad, self._gradients[i])}
        self._local = self._local - touched if synced else self._local | touched
        self._remember_gradients()

    def check_averaged(self, parameters: Sequence[Tensor]) -> None:
        """Raise if an optimizer is about to step with gradients that differ between ranks."""
        local = [p for p in parameters if p.grad is not None and self._places.get(id(p)) in self._local]
        if local:
            raise UnsupportedError(
                f"An optimizer was stepped with {len(local)} gradients that were not averaged (as with"
                " `toggle_model(sync_grad=False)` or `no_sync`). Each rank's step would differ, and a finished rank"
                " cannot follow it. Step only after a backward that syncs."
            )

    def changes(self, with_parameters: bool) -> Changes:
        """Return the changes made by hand since all ranks had the same values.

        Args:
            with_parameters: Whether to compare the parameters too.

        Raises:
            JoinError: A gradient that only this rank has was changed, so other ranks cannot repeat the change.
            UnsupportedError: A sparse gradient was changed.
        """
        found, asked = Changes([], [], [], []), []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if is_known(gradient, self._gradients[place]):
                continue
            if gradient is None:
                found.cleared.append(place)
            elif gradient.is_sparse:
                raise UnsupportedError(
                    f"A sparse gradient (of a parameter of shape {tuple(parameter.shape)}) was modified by hand,"
                    " which a finished rank cannot repeat. Do not modify it after backward, or use sparse=False."
                )
            else:
                asked.append((place, gradient.detach().any()))
        before, now = self._sums, self._checksums() if with_parameters else self._sums
        differ = [old != new for (_, old), (_, new) in zip(before, now, strict=True)] if with_parameters else []
        flags = read([*(flag for _, flag in asked), *differ])  # the only read from the device
        for (place, _), (holds_something,) in zip(asked, flags, strict=False):
            if not holds_something:
                found.zeroed.append(place)
            elif place in self._local:
                raise JoinError(
                    f"A gradient (of a parameter of shape {tuple(self._parameters[place].shape)}) was modified by"
                    " hand (clipping, scaling, noise) between backwards without a sync. The gradients still differ"
                    " between ranks then, so finished ranks cannot repeat the change. Modify them only after a"
                    " backward that syncs."
                )
            else:
                found.gradients.append(place)
        self._local.difference_update(found.cleared, found.zeroed)
        self._sums = now
        for (places, _), changed in zip(now, flags[len(asked) :], strict=False):
            found.parameters.extend(place for place, is_so in zip(places, changed, strict=True) if is_so)
        found.parameters.sort()
        return found

    def take(self, changes: Changes, src: int) -> None:
        """Apply the changes of rank `src` of the process group to this rank; all ranks call this."""
        for place in changes.cleared:
            self._parameters[place].grad = None
        for place in changes.zeroed:
            self._gradient(place).detach().zero_()
        tensors = [self._gradient(place) for place in changes.gradients]
        tensors += [self._parameters[place].data for place in changes.parameters]
        if tensors:
            _compat.broadcast_coalesced(self._ddp.process_group, tensors, self._ddp.broadcast_bucket_size, src)
        self._remember_gradients()

    def _remember_gradients(self) -> None:
        self._gradients = [known(p.grad) for p in self._parameters]

    def _gradient(self, place: int) -> Tensor:
        """Return the gradient at this place; create zeros if there is none."""
        parameter: Tensor = self._parameters[place]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _checksums(self) -> list[tuple[list[int], Tensor]]:
        # By value, since `parameter.data.clamp_()` leaves no other trace.
        return unread_checksums([p.detach() for p in self._parameters])


def known(gradient: Tensor | None) -> Known:
    """Return a record by which `is_known` tells later whether `gradient` is the same tensor, and unchanged."""
    return None if gradient is None else (weakref.ref(gradient), versions(gradient))


def versions(tensor: Tensor) -> tuple[int, int]:
    """Return the version of a tensor, and of this rank's part of it: some operations increment only one of them."""
    if type(tensor) is Tensor:
        return tensor._version, tensor._version
    return tensor._version, _compat.local_part(tensor)._version


def is_known(gradient: Tensor | None, known: Known) -> bool:
    """Whether `gradient` is still the tensor that `known` records, and unchanged."""
    if gradient is None or known is None:
        return gradient is None and known is None
    reference, before = known
    return reference() is gradient and versions(gradient) == before
