"""A model's first iteration, which under `static_graph=True` fixes how often each parameter fires in later ones."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_join._base.errors import JoinError, UnsupportedError

# How often each parameter fired in a model's first iteration. Kept here because models outlive their shadows.
_first_iterations: WeakKeyDictionary[DistributedDataParallel, dict[int, int]] = WeakKeyDictionary()
# Models whose first iteration was a shadow on this rank, and how often their parameters fired on an active rank.
_guessed: WeakKeyDictionary[DistributedDataParallel, list[int] | None] = WeakKeyDictionary()


class FirstIteration:
    """The record of a model's first iteration on this rank, and on others.

    Args:
        ddp: The model.
        parameters: The parameters that DDP averages, in its order.

    Attributes:
        decides: Whether it decides about later iterations.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
        self._ddp = ddp
        self.decides = bool(ddp.static_graph)
        self._parameters = parameters
        self._fired: dict[int, int] | None = _first_iterations.setdefault(ddp, {}) if ddp.static_graph else None
        self._watches: list[RemovableHandle] = []

    @property
    def is_now(self) -> bool:
        """Whether it has not ended yet."""
        return self._fired == {}

    def guess(self) -> None:
        """If this is the first iteration, record that this rank runs it without a batch."""
        if self.is_now:
            _guessed[self._ddp] = None

    def watch(self) -> None:
        """Watch which parameters fire in the first iteration, if it decides about later ones."""
        if self._fired == {}:  # and not `None`
            self._watches += [self._watch(p, self._fired) for p in self._parameters if p.requires_grad]

    def unwatch(self) -> None:
        """Stop watching, since two watches would count twice."""
        while self._watches:
            self._watches.pop().remove()

    def finish_watching(self) -> None:
        """Stop watching which parameters fire, once the first iteration has shown it."""
        if self._fired:
            self.unwatch()

    @property
    def fired(self) -> list[int] | None:
        """How often each parameter got a gradient in the first iteration under `static_graph=True`, if known here."""
        return self._times() if self._fired and self._ddp not in _guessed else None

    def note_fired(self, counts: list[int] | None) -> None:
        """Record another rank's counts, if this rank's are from a shadow, in which every parameter gets a gradient."""
        if counts is not None and self._ddp in _guessed:
            _guessed[self._ddp] = counts

    @property
    def shadow_only(self) -> bool:
        """Whether this rank cannot run the model itself; see `check_fired`."""
        return self._fired is not None and _guessed.get(self._ddp) not in (None, self._times())

    def check_fired(self) -> None:
        """Raise if this rank cannot run the model itself.

        Raises:
            JoinError: DDP would wait for parameters that get no gradient.
        """
        own, other = self._times(), _guessed.get(self._ddp)
        if not self.shadow_only or other is None:
            return
        where = next(index for index, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
        raise JoinError(
            "static_graph=True fixes in the first iteration how many gradients each parameter gets, but the ranks"
            f" disagree: parameter {where}, of shape {tuple(self._parameters[where].shape)}, got {own[where]} on this"
            f" rank and {other[where]} on another. Give each rank a batch in the first iteration, freeze unused"
            " parameters, or use static_graph=False with find_unused_parameters=True."
        )

    def _times(self) -> list[int]:
        return [(self._fired or {}).get(id(p), 0) for p in self._parameters]

    def fires(self, parameter: Tensor) -> bool:
        if not self._fired:
            return True
        times = self._fired.get(id(parameter), 0)
        if times > 1:
            raise UnsupportedError(
                f"A parameter of shape {tuple(parameter.shape)} receives {times} gradients per backward under"
                " static_graph=True (as with reentrant activation checkpointing), which a finished rank cannot"
                " repeat. Use checkpointing with use_reentrant=False, or static_graph=False."
            )
        return times == 1

    def _watch(self, parameter: Tensor, fired: dict[int, int]) -> RemovableHandle:
        def count(*_: Any) -> None:
            fired[id(parameter)] = fired.get(id(parameter), 0) + 1

        return get_gradient_edge(parameter).node.register_prehook(count)
