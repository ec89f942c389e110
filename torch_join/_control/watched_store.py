"""A store whose requests are given up where its server may be stopped, as torch ends none, or is known to be gone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_join._control.beside import beside


class WatchedStore:
    """The part of torch's stores that is used while the connections are made.

    Args:
        store: The store.
        look: Returns what is called again and again while a request is under way, and may raise.
    """

    def __init__(self, store: dist.Store, look: Callable[[], Callable[[], None] | None]) -> None:
        self._store: Any = store
        self._look = look
        self._loss: str | None = None  # what torch has said of a server that is gone

    def _ask(self, name: str, *args: Any) -> Any:
        if self._loss is not None:  # torch may take five seconds to say so again
            raise dist.DistNetworkError(self._loss)
        try:
            return beside(lambda: getattr(self._store, name)(*args), self._look() or (lambda: None))
        except dist.DistNetworkError as error:  # no `add` is made here, for which a server hangs up that goes on
            self._loss = str(error)
            raise

    def set_timeout(self, timeout: Any) -> None:
        """Limit how long a request waits for a key."""
        self._ask("set_timeout", timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._ask("set", key, value)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """Give a key another value where it has the one that is expected."""
        return self._ask("compare_set", key, expected, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether these keys are there."""
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """Return the value of a key."""
        return bytes(self._ask("get", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys."""
        return list(self._ask("multi_get", keys))

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._ask("delete_key", key)
