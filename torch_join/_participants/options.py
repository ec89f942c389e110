"""The user's options for joining, in one object that checks them when it is created."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypedDict, TypeVar

from torch_join._base.errors import JoinFutureWarning, JoinTypeError, JoinValueError
from torch_join._base.weighting import WORLD, Weighting, resolve_weighting
from torch_join._control.channel import TIMEOUT
from torch_join._handover.audit import Often
from torch_join._monitor.monitor import JoinMonitor
from torch_join._schedule.placeholders import Placeholder, check_placeholder

P = ParamSpec("P")
R = TypeVar("R")

TORCHS = "divide_by_initial_world_size"  # torch's name for a weighting


class JoinOptions(TypedDict, total=False):
    """The keyword arguments of `Join`, to annotate functions that pass them on."""

    throw_on_early_termination: bool
    weighting: Weighting
    divide_by_initial_world_size: bool | None
    may_break: bool
    timeout: timedelta
    audit: Often
    hand_over_ignored: bool | None
    hand_over_buffers: bool | None
    backward_collectives: bool
    rebalance: bool
    placeholder: Placeholder | None
    monitor: JoinMonitor | None


@dataclass(frozen=True)
class Options:
    """The user's options, equal on all ranks; `Join` documents each.

    Attributes:
        hooks: The arguments for every `join_hook`.

    Raises:
        JoinTypeError: `timeout` is not a time, or `monitor` is not a `JoinMonitor`.
        JoinValueError: An option contradicts `rebalance`, or `placeholder` is unknown.
    """

    enable: bool = True
    throw_on_early_termination: bool = False
    weighting: Weighting = WORLD
    may_break: bool = False
    timeout: timedelta = TIMEOUT
    audit: Often = "tail"
    hand_over_ignored: bool | None = None
    hand_over_buffers: bool | None = None
    backward_collectives: bool = False
    rebalance: bool = False
    placeholder: Placeholder | None = None
    monitor: JoinMonitor | None = None
    hooks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta):
            seconds = self.timeout if isinstance(self.timeout, (int, float)) else int(TIMEOUT.total_seconds())
            raise JoinTypeError(
                f"timeout (how long a rank waits for another) must be a datetime.timedelta, not {self.timeout!r}."
                f" Write timeout=timedelta(seconds={seconds})."
            )
        if not (self.monitor is None or isinstance(self.monitor, JoinMonitor)):
            raise JoinTypeError(
                f"monitor must be a torch_join.JoinMonitor, not {self.monitor!r}. Pass"
                " monitor=JoinMonitor('report.html') after `from torch_join import JoinMonitor`; the JoinMonitors of"
                " lightning_join and accelerate_join.transformers are Trainer callbacks."
            )
        if self.rebalance and self.may_break:
            raise JoinValueError(
                "rebalance=True cannot be combined with may_break=True: a rank that leaves with `break` would not"
                " train on the batches it receives. Remove one of them; rebalance=True needs no may_break."
            )
        if self.rebalance and self.throw_on_early_termination:
            raise JoinValueError(
                "rebalance=True cannot be combined with throw_on_early_termination=True: with rebalanced batches, no"
                " rank runs out before the others. Remove one of them."
            )

        self.check_placeholder(self.placeholder)

    def check_placeholder(self, placeholder: Placeholder | None) -> None:
        """Raise if finished ranks cannot run `placeholder` with the other options.

        Raises:
            JoinTypeError: `placeholder` is neither a string nor a function.
            JoinValueError: `placeholder` is an unknown string, or contradicts another option.
        """
        if placeholder is None:
            return
        check_placeholder(placeholder)
        if self.rebalance:
            raise JoinValueError(
                "placeholder= cannot be combined with rebalance=True: a rank that receives other ranks' batches runs no"
                " placeholder. Use only one of them."
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Options":
        """Take the options, by name, from a function's arguments, which may include others.

        Raises:
            JoinValueError: The weighting is unknown, or contradicts torch's argument for it.
        """
        own = {name: arguments[name] for name in cls.__dataclass_fields__ if name in arguments}
        divides = {**own.get("hooks", {}), **arguments}.get(TORCHS)
        return cls(**{**own, "weighting": resolve_weighting(own.get("weighting"), divides)})


def renamed(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function accept `may_break` under its old name too, until 0.3.0.

    Raises:
        JoinTypeError: A call passes both names.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "heartbeat" in kwargs:
            warn_renamed("heartbeat", "may_break", both="may_break" in kwargs)
            kwargs["may_break"] = kwargs.pop("heartbeat")
        return function(*args, **kwargs)

    return call


def by_old_name(old: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return a function under its old name, which works until 0.3.0."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        JoinFutureWarning.warn(f"{old} was renamed to {function.__name__}. The old name works until 0.3.0.")
        return function(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"Call `{function.__name__}`, which had this name until 0.3.0."
    return call


def showing_options(function: Callable[P, R]) -> Callable[P, R]:
    """Show the keyword arguments of `Join` in the signature of a function that passes `**options` on."""
    whole = signature(function)
    *own, rest = whole.parameters.values()
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=kind)
        for name, kind in JoinOptions.__annotations__.items()
        if name != TORCHS
    ]
    function.__signature__ = whole.replace(parameters=[*own, *options, rest])  # type: ignore[attr-defined]
    return function


def warn_renamed(old: str, new: str, both: bool) -> None:
    """Warn user code about a keyword's old name; raise if it passes `both` names."""
    if both:
        raise JoinTypeError(f"Both {new}= and its old name {old}= were passed. Remove {old}=.")
    JoinFutureWarning.warn(f"{old}= was renamed to {new}=. The old name works until 0.3.0.")


def whole_signature(kind: type, own_base: type) -> Signature:
    """Return a class's signature with its bases' parameters instead of its `**kwargs`.

    Args:
        kind: The class.
        own_base: Its last base class in this package; the next base with an `__init__` is the last one used.
    """
    found: dict[str, Parameter] = {}
    for place, each in enumerate(kind.__mro__):
        if "__init__" in vars(each):
            _, *more = signature(each.__init__).parameters.values()  # type: ignore[misc]
            if found.pop("kwargs", None):  # callers pass these by keyword
                more = [p.replace(kind=max(p.kind, p.KEYWORD_ONLY)) for p in more if p.kind is not p.VAR_POSITIONAL]
            found |= {p.name: p for p in more if p.name not in found}
            if "kwargs" not in found or place > kind.__mro__.index(own_base):
                break
    return Signature(sorted(found.values(), key=lambda p: p.kind))
