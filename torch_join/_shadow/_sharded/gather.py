"""The gathers of a unit of `fully_shard`, as FSDP lets others do them: by an object with `allocate` and a call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class AnnouncedGather:
    """What a unit gathers by, with something around each gather, from when it is certain: what is copied takes time.

    Args:
        inner: FSDP's own, or the user's.
        unshard: The unit's own way to gather, which calls this.
        around: Returns what to put around a gather, `None` where that is nothing.
        will_gather: Whether `unshard` is going to gather; `None` if it asks `inner` for the memory then.
    """

    def __init__(
        self,
        inner: Any,
        unshard: Callable[..., None],
        around: Callable[[], AbstractContextManager[None] | None],
        will_gather: Callable[[], bool] | None = None,
    ) -> None:
        self._inner, self._unshard, self._around, self._will_gather = inner, unshard, around, will_gather
        self._open: ExitStack | None = None

    def unshard(self, *args: Any, **kwargs: Any) -> None:
        try:
            if self._will_gather is not None and self._will_gather():
                self._begin()
            self._unshard(*args, **kwargs)
        finally:
            if (opened := self._open) is not None:
                self._open = None
                opened.close()

    def _begin(self) -> None:
        if (around := self._around()) is not None:
            self._open = self._open or ExitStack()
            self._open.enter_context(around)

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)
