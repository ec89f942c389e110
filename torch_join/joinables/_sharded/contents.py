"""Whether the active ranks change a sharded model's parameters in a way that no joined rank hears of."""

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_join._base import compat as _compat
from torch_join._base.errors import JoinError
from torch_join._handover.digest import joint_checksums


class Contents:
    """This rank's shards, as they were when all ranks had last done the same to theirs.

    Args:
        parameters: Returns the shards.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._sums: list[int] | None = None

    @property
    def known(self) -> bool:
        """Whether there is something to compare with."""
        return self._sums is not None

    def remember(self) -> None:
        """Note what they are now."""
        self._sums = self._read()

    def forget(self) -> None:
        """Compare no more."""
        self._sums = None

    def check(self, joined: Sequence[int]) -> None:
        """Compare.

        Raises:
            JoinError: They have changed.
        """
        if self._sums is None or self._sums == self._read():
            return
        raise JoinError(
            "The sharded parameters were changed outside of the optimizer's step (clipping or projecting weights,"
            f" loading a state, an optimizer that was not given to Join), while ranks {list(joined)} have joined: they"
            " own a part of these parameters and cannot know of it. Do it after the loop, or give Join the optimizer"
            " that does it."
        )

    def _read(self) -> list[int]:
        return joint_checksums([_compat.local_part(parameter).detach() for parameter in self._parameters()])
