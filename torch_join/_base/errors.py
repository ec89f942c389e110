"""The errors of torch_join, lightning_join and accelerate_join.

    JoinError (RuntimeError)          anything that joining on uneven inputs cannot do
    ├── JoinValueError (ValueError)   an argument or a set-up holds a value that is not allowed
    ├── JoinTypeError (TypeError)     an argument or a set-up is of a type that is not allowed
    ├── UnsupportedError              the set-up cannot be trained exactly on uneven inputs (yet)
    ├── EarlyTerminationError         a rank ran out of inputs and `throw_on_early_termination` is set
    ├── PeerFailedError               another rank failed; the message says which and why
    └── JoinTimeoutError (TimeoutError)  another rank did not answer in time

    JoinWarning (UserWarning)         the set-up works, but perhaps not as intended
    ├── JoinDriftWarning              ranks hold different states, or a value from only some ranks' batches
    ├── JoinDataWarning               samples are left out, trained on twice, or read in another order
    ├── JoinPerformanceWarning        training takes longer than necessary
    └── JoinFutureWarning (FutureWarning)  an old name, which works until the next minor release

`JoinError` is a `RuntimeError` because that is what `torch.distributed.algorithms.Join` raises.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import FrameType


class JoinError(RuntimeError):
    """Base class of all errors that torch-join raises on purpose."""


class JoinValueError(JoinError, ValueError):
    """An argument, or another part of the setup, has an invalid value."""


class JoinTypeError(JoinError, TypeError):
    """An argument, or another part of the setup, has an invalid type."""


class UnsupportedError(JoinError):
    """This setup does not support exact training on uneven inputs (yet)."""


class EarlyTerminationError(JoinError):
    """A rank ran out of inputs before others, with `throw_on_early_termination=True`."""


class PeerFailedError(JoinError):
    """Another rank failed; the message says which and why.

    Attributes:
        rank: The failed rank's number in the job, or `None` if that is not known.
        reason: The cause, as reported by that rank or by others.
    """

    def __init__(self, message: str, rank: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class JoinTimeoutError(JoinError, TimeoutError):
    """Another rank did not answer in time."""


class JoinWarning(UserWarning):
    """Training works, but perhaps not as intended."""

    @classmethod
    def warn(cls, text: str) -> None:
        """Warn at the line of user code that led here, or at the outermost line if there is none."""
        frame = sys._getframe(1)
        while frame.f_back and _package(frame) in NOT_USERS:
            frame = frame.f_back
        known = frame.f_globals
        name, registry = known.get("__name__") or "<string>", known.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, cls, frame.f_code.co_filename, frame.f_lineno, name, registry)


class JoinDriftWarning(JoinWarning):
    """Ranks have different state, or a value reflects only some ranks' batches."""


class JoinDataWarning(JoinWarning):
    """Samples are skipped, trained on twice, or read in a different order."""


class JoinPerformanceWarning(JoinWarning):
    """Training takes longer than necessary."""


class JoinFutureWarning(JoinWarning, FutureWarning):
    """An old name, which works until the next minor release."""


_OURS = frozenset(["torch_join", "lightning_join", "pytorch_lightning_join", "accelerate_join"])
_FRAMEWORKS = (
    "torch torchmetrics lightning lightning_fabric lightning_utilities pytorch_lightning accelerate transformers trl"
    " deepspeed contextlib functools importlib threading"
)
NOT_USERS = _OURS.union(_FRAMEWORKS.split())


def _package(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def shorten_traceback(error: BaseException) -> None:
    """Remove the frames of these packages from a traceback of a `JoinError`, but for the first and the last.

    `TORCH_JOIN_TRACEBACK=full` keeps them.
    """
    if not isinstance(error, JoinError) or os.environ.get("TORCH_JOIN_TRACEBACK") == "full":
        return
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    removed = [entry for entry in entries if _package(entry.tb_frame) in _OURS][1:-1]
    for entry, following in pairwise(entry for entry in entries if entry not in removed):
        entry.tb_next = following


def raise_any(error: BaseException | None) -> None:
    """Raise an error, if there is one, without keeping it in a frame's variable: that would be a reference cycle."""
    try:
        if error is not None:
            raise error
    finally:
        del error


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks in words: "rank 1", "ranks 0, 2"."""
    names = sorted(ranks)
    return f"rank {names[0]}" if len(names) == 1 else "ranks " + ", ".join(map(str, names))


# Sent at the end of training, in place of the list of objects that ranks send at the start of a `with`.
ENDS = ["(the end of training)"]
DECIDE = (
    "Decide after the loop, which all ranks reach: a finished rank does not see decisions that the others make inside"
    " the loop. In Accelerate, call set_trigger in the body and `if accelerator.check_trigger(): break` after the"
    " loop; in Fabric, `if fabric.strategy.reduce_boolean_decision(stop, all=False): break` after the loop."
)


def check_all_go_on(messages: Sequence[Sequence[str]], names: Sequence[int]) -> None:
    """Compare the ranks' messages at the start of a `with`.

    Raises:
        JoinError: Some ranks have ended their training, and others start a `with`.
    """
    ended = [name for name, message in zip(names, messages, strict=True) if message == ENDS]
    if ended and len(ended) < len(messages):
        starting = name_ranks(name for name in names if name not in ended)
        raise JoinError(
            f"{name_ranks(ended).capitalize()} ended training, but {starting} started another loop or `with`. Usually"
            f" the decision to stop was made in the loop's body, which finished ranks do not run. {DECIDE}"
        )
