"""The errors of torch_join, lightning_join and accelerate_join.

    JoinError (RuntimeError)          anything that joining on uneven inputs cannot do
    ├── JoinValueError (ValueError)   an argument or a set-up holds a value that is not allowed
    ├── JoinTypeError (TypeError)     an argument or a set-up is of a type that is not allowed
    ├── UnsupportedError              the set-up cannot be trained exactly on uneven inputs (yet)
    ├── EarlyTerminationError         a rank ran out of inputs and `throw_on_early_termination` is set
    ├── PeerFailedError               another rank failed; the message says which and why
    └── JoinTimeoutError (TimeoutError)  another rank did not answer in time

`JoinError` is a `RuntimeError` because that is what `torch.distributed.algorithms.Join` raises.
"""

from collections.abc import Iterable


class JoinError(RuntimeError):
    """Base of every error that this project raises on purpose."""


class JoinValueError(JoinError, ValueError):
    """An argument or a set-up holds a value that is not allowed."""


class JoinTypeError(JoinError, TypeError):
    """An argument or a set-up is of a type that is not allowed."""


class UnsupportedError(JoinError):
    """The set-up cannot be trained exactly on uneven inputs (yet)."""


class EarlyTerminationError(JoinError):
    """A rank ran out of inputs and `throw_on_early_termination` is set."""


class PeerFailedError(JoinError):
    """Another rank failed; the message says which and why.

    Attributes:
        rank: Its number in the job, or `None` where that is not known.
        reason: Why, as that rank says, or others of it.
    """

    def __init__(self, message: str, rank: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class JoinTimeoutError(JoinError, TimeoutError):
    """Another rank did not answer in time."""


def raise_any(error: BaseException | None) -> None:
    """Raise an error, if there is one, of which no frame that it passes has a name: they would keep each other."""
    try:
        if error is not None:
            raise error
    finally:
        del error


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks in words: "rank 1", "ranks 0, 2"."""
    names = sorted(ranks)
    return f"rank {names[0]}" if len(names) == 1 else "ranks " + ", ".join(map(str, names))
