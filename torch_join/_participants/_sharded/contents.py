"""Checks whether active ranks change a sharded model's parameters without announcing it to joined ranks."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from torch import Tensor

from torch_join._base.errors import JoinError
from torch_join._compat import ddp as _compat
from torch_join._handover.digest import local_checksums


class Contents:
    """This rank's shards, as of the last moment at which all ranks had changed theirs in the same way.

    Args:
        parameters: Returns the shards.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._sums: dict[int, int] | None = None  # by `id`
        # By `id`: how often each was written to. A clamp that changes nothing here may change a joined rank's shard.
        self._versions: dict[int, int] = {}
        self._hooks: dict[int, int] = {}  # by `id`: the number of its hooks, which joined ranks have too

    @property
    def known(self) -> bool:
        """Whether there is a state to compare with."""
        return self._sums is not None

    def remember(self, only: Collection[int] | None = None) -> None:
        """Note the shards' current state; only of those with these `id`s, if the other states are known."""
        if only is None or self._sums is None:
            self._sums, self._versions = {}, {}
            self._hooks = {id(p): _compat.shard_hooks(p) for p in self._parameters()}
        parameters = [p for p in self._parameters() if only is None or id(p) in only]
        self._sums |= self._read(parameters)
        self._versions |= {id(p): _compat.writes(p) for p in parameters}

    def forget(self) -> None:
        """Stop comparing."""
        self._sums, self._versions = None, {}

    def check(self, joined: Sequence[int]) -> None:
        """Compare the shards with the noted state.

        Raises:
            JoinError: A shard has changed.
        """
        if self._sums is None:
            return
        self.check_writes(self._parameters(), joined)
        now = self._read(self._parameters())
        where = next((i for i, (key, value) in enumerate(now.items()) if self._sums.get(key, value) != value), None)
        if where is not None:
            self._raise(where, joined)

    def check_writes(self, parameters: Sequence[Tensor], joined: Sequence[int]) -> None:
        """Check whether any of these shards was written to; does not wait for a device.

        Raises:
            JoinError: A shard was written to.
        """
        for index, parameter in enumerate(parameters):
            if self._versions.get(id(parameter), now := _compat.writes(parameter)) != now:
                self._raise(index, joined)

    def check_hooks(self, joined: Sequence[int]) -> None:
        """Check whether hooks of a gradient were added or removed.

        Raises:
            JoinError: A hook was added or removed.
        """
        for index, parameter in enumerate(self._parameters() if self._sums is not None else ()):
            if self._hooks.get(id(parameter), now := _compat.shard_hooks(parameter)) != now:
                raise JoinError(
                    f"A hook of a sharded gradient (parameter {index} of this rank's shards) was registered or"
                    f" removed after ranks {list(joined)} finished. They reduce this gradient without that change."
                    " Register hooks before the loop."
                )

    def _raise(self, where: int, joined: Sequence[int]) -> NoReturn:
        raise JoinError(
            f"The sharded parameters were modified outside the optimizer step (parameter {where} of this rank's"
            f" shards), for example by weight clipping or load_state_dict. Ranks {list(joined)} have finished and"
            " cannot modify their shards. Modify the parameters after the loop; if an optimizer does it, pass it to"
            " Join."
        )

    def _read(self, parameters: Sequence[Tensor]) -> dict[int, int]:
        sums = local_checksums([_compat.local_part(parameter).detach() for parameter in parameters])
        return dict(zip(map(id, parameters), sums, strict=True))


def state_of(optimizer: Any) -> Any:
    """Return the parameters of each group, and the state of each parameter, to compare later."""
    kept = {
        id(p): {
            name: (id(value), _compat.writes(value)) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        for p, state in optimizer.state.items()
        if state  # reading a missing state creates it
    }
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups], kept


def check_state(optimizer: Any, before: Any, joined: Sequence[int]) -> None:
    """Compare an optimizer with a result of `state_of`.

    Raises:
        JoinError: User code has changed it.
    """
    if before != state_of(optimizer):
        raise JoinError(
            f"The state of {type(optimizer).__name__} was modified outside its step (cleared, scaled or loaded, or a"
            f" parameter moved to another group) after ranks {list(joined)} finished. They step their part of the"
            " sharded parameters without that change. Modify the state after the loop."
        )
