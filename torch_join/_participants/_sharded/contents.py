"""Whether the active ranks change a sharded model's parameters in a way that no joined rank hears of."""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from torch_join._base.errors import JoinError
from torch_join._compat import ddp as _compat
from torch_join._handover.digest import local_checksums


class Contents:
    """This rank's shards, as they were when all ranks had last done the same to theirs.

    Args:
        parameters: Returns the shards.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._sums: dict[int, int] | None = None  # by `id`: what is frozen or unfrozen since is not compared

    @property
    def known(self) -> bool:
        """Whether there is something to compare with."""
        return self._sums is not None

    def remember(self, only: Collection[int] | None = None) -> None:
        """Note what they are now; of some, by `id`, if the others are known."""
        self._sums = self._read() if only is None or self._sums is None else self._sums | self._read(only)

    def forget(self) -> None:
        """Compare no more."""
        self._sums = None

    def check(self, joined: Sequence[int]) -> None:
        """Compare.

        Raises:
            JoinError: They have changed.
        """
        before = self._sums or {}
        now = self._read() if before else {}
        where = next((i for i, (key, value) in enumerate(now.items()) if before.get(key, value) != value), None)
        if where is None:
            return
        raise JoinError(
            f"The sharded parameters were changed outside of the optimizer's step (parameter {where} of this rank's"
            f" shards: clipping or projecting weights, loading a state, an optimizer that was not given to Join), while"
            f" ranks {list(joined)} have joined: they own a part of these parameters and cannot know of it. Do it after"
            " the loop, or give Join the optimizer that does it."
        )

    def _read(self, only: Collection[int] | None = None) -> dict[int, int]:
        parameters = [p for p in self._parameters() if only is None or id(p) in only]
        sums = local_checksums([_compat.local_part(parameter).detach() for parameter in parameters])
        return dict(zip(map(id, parameters), sums, strict=True))
