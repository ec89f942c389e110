"""What has become of a model's gradients since a moment at which all ranks had done the same with them.

A rank that has joined holds gradients too: the last average, or what it has accumulated without a sync. Whether
these still count depends on what the active ranks do to theirs, and users clear gradients in ways that nobody
announces: `zero_grad` either way, `p.grad = None`, `p.grad.data.zero_()`, another tensor in its place. So an active
rank remembers, per parameter, the tensor (weakly: addresses are used again), its version, and after a backward
without a sync its norm; later it tells from these what was cleared. After a sync the norm need not be known:
where a rank that has joined holds an average, and an active rank has nothing or zero in its place, it was cleared.

Where nothing can be seen (no gradient before and now; zero before and now), the optimizer's `zero_grad` decides, if
the loop uses it, and then the other parameters. Where these show nothing either, the verdict is `UNKNOWN`: a rank
that has joined and holds something of its own asks the other active ranks, and raises if they do not know.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_join._codec import closed
from torch_join._errors import JoinError

CLEARED, KEPT, CHANGED, UNKNOWN = "cleared", "kept", "changed", "unknown"
NONE, ZERO, FULL = "none", "zero", "full"


@closed("gradient")
class State(NamedTuple):
    """What has become of one gradient.

    Attributes:
        verdict: `CLEARED`, `KEPT`, `CHANGED` by hand, or `UNKNOWN`.
        content: What it is now: `NONE`, `ZERO` or `FULL`, which is anything else.
        norm: Its 1-norm, where it is the kept average of all ranks.
    """

    verdict: str
    content: str
    norm: float | None = None


class Gradients:
    """The gradients of a model's parameters on one rank.

    Args:
        parameters: The parameters.
        optimizers: Those that may step them; a call of their `zero_grad` is evidence.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizers: Iterable[Any] = ()) -> None:
        self._parameters = parameters
        self._known: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(parameters)
        self._norms: list[Tensor | None] | None = None  # of the same moment; None after a sync
        self._clears = [Clears(optimizer) for optimizer in optimizers]

    def close(self) -> None:
        """Take back what was installed."""
        for clears in self._clears:
            clears.remove()

    def remember(self, accumulates: bool) -> None:
        """Remember what there is now.

        Args:
            accumulates: Whether the ranks' gradients differ, since the last backward did not sync.
        """
        gradients = [p.grad for p in self._parameters]
        self._known = [None if g is None else (weakref.ref(g), g._version) for g in gradients]
        self._norms = _norms(gradients) if accumulates else None
        for clears in self._clears:
            clears.recent = False

    def states(self) -> list[State]:
        """Return what has become of each since then."""
        gradients = [p.grad for p in self._parameters]
        now = _read(_norms(gradients))
        before = None if self._norms is None else _read(self._norms)
        found = [
            self._state(gradient, known, norm, None if before is None else before[index], before is not None)
            for index, (gradient, known, norm) in enumerate(zip(gradients, self._known, now, strict=True))
        ]
        if any(state.verdict == UNKNOWN for state in found):
            found = self._decide(found)
        return found

    def _state(
        self, gradient: Tensor | None, known: Any, norm: float | None, before: float | None, accumulates: bool
    ) -> State:
        if gradient is None or norm is None:
            return State(UNKNOWN if known is None else CLEARED, NONE)
        content = FULL if norm != 0 else ZERO
        if known is None or known[0]() is not gradient or known[1] != gradient._version:
            return State(CHANGED if content == FULL else CLEARED, content)
        if not accumulates:
            return State(KEPT, FULL, norm) if content == FULL else State(UNKNOWN, ZERO)
        if content == ZERO:
            return State(UNKNOWN if before == 0 else CLEARED, ZERO)
        return State(KEPT if _same(norm, before) else CHANGED, FULL)

    @property
    def accumulates(self) -> bool:
        """Whether the ranks' gradients differed when they were remembered."""
        return self._norms is not None

    def _decide(self, found: list[State]) -> list[State]:
        """Replace `UNKNOWN` where there is evidence elsewhere."""
        called = {id(p): clears.recent for clears in self._clears if clears.used for p in clears.parameters()}
        verdicts = {state.verdict for state in found}
        kept, cleared = KEPT in verdicts, CLEARED in verdicts
        decided = []
        for parameter, state in zip(self._parameters, found, strict=True):
            verdict = state.verdict
            if verdict == UNKNOWN and id(parameter) in called:
                verdict = CLEARED if called[id(parameter)] else KEPT
            elif verdict == UNKNOWN and (kept or cleared):
                # What is zero was there when others were cleared. What is not there may be part of an accumulation.
                verdict = (CLEARED if cleared else KEPT) if state.content == ZERO else KEPT if kept else CLEARED
            decided.append(state._replace(verdict=verdict))
        return decided

    def raise_if_changed(self, states: Sequence[State], joined: Sequence[int]) -> None:
        """Raise if one was changed by hand before the next backward accumulates into it.

        Raises:
            JoinError: So it was, and `joined`, ranks that have joined, cannot know of it.
        """
        where = next((index for index, state in enumerate(states) if state.verdict == CHANGED), None)
        if where is not None:
            raise JoinError(
                "A gradient was changed by hand since the last backward (clipping, scaling, noise) and not cleared"
                f" before the next one accumulates into it (parameter {where}, of shape"
                f" {tuple(self._parameters[where].shape)}), while ranks {list(joined)} have joined: they"
                " cannot know of the change. Call zero_grad() after each optimizer step, or change gradients only"
                " right before it. (Activation checkpointing with use_reentrant=True looks the same: use False.)"
            )

    def follow(self, states: Sequence[State], accumulates: bool, ask: Callable[[], str] | None) -> None:
        """Do on a rank that has joined what has become of an active rank's gradients.

        Args:
            states: The active rank's.
            accumulates: Whether this rank holds what it has accumulated without a sync.
            ask: Returns the verdict of the other active ranks. `None` where no backward comes next, for which it
                would have to be known.

        Raises:
            JoinError: Nobody can tell whether what this rank holds was cleared.
        """
        verdict = None
        for index, (parameter, state) in enumerate(zip(self._parameters, states, strict=True)):
            if state.verdict == CHANGED or (state.verdict == KEPT and state.content == FULL):
                continue
            if state.verdict != CLEARED and accumulates and _holds_something(parameter.grad):
                if state.verdict == KEPT or ask is None:
                    continue
                if verdict is None:
                    verdict = ask()
                if verdict == UNKNOWN:
                    self._raise_unknown(index)
                if verdict == KEPT:
                    continue
            if state.content == NONE:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def differing(self, states: Sequence[State], accumulates: bool) -> list[int]:
        """Return which averages, that an active rank has kept, are others than this rank's: changed without a trace.

        `GradScaler.unscale_` leaves none, for example.
        """
        if accumulates or all(state.norm is None for state in states):
            return []
        mine = _read(
            _norms([None if s.norm is None else p.grad for p, s in zip(self._parameters, states, strict=True)])
        )
        return [
            index
            for index, (norm, state) in enumerate(zip(mine, states, strict=True))
            if norm is not None and not _alike(norm, state.norm)
        ]

    def raise_if_differing(self, states: Sequence[State], accumulates: bool) -> None:
        """Raise if there are any before the next backward accumulates into them.

        Raises:
            JoinError: There are.
        """
        for index in self.differing(states, accumulates)[:1]:
            raise JoinError(
                f"The active ranks' gradient of parameter {index}, of shape {tuple(self._parameters[index].shape)}, is"
                " no longer the average that this rank got too, and the next backward accumulates into it: it was"
                " changed by hand (through `.data` or GradScaler.unscale_, for example), which ranks that have joined"
                " cannot know. Call zero_grad() after each optimizer step, or change gradients only right before it."
            )

    def _raise_unknown(self, index: int) -> None:
        raise JoinError(
            "This rank has joined while it holds a gradient that no sync has averaged yet (parameter"
            f" {index}, of shape {tuple(self._parameters[index].shape)}), and no active rank can tell whether such"
            " gradients have been cleared since: the active rank has none, or zeros, before and now (a backward"
            " that was skipped, a batch that is masked out), and nothing was seen of a zero_grad(). Give Join"
            " the optimizer and clear with its zero_grad(), or run a backward in each step of an accumulation."
        )


def common_verdict(verdicts: Iterable[str]) -> str:
    """Return `CLEARED` or `KEPT` if there is evidence of one and none of the other, and else `UNKNOWN`."""
    found = {*verdicts} & {CLEARED, KEPT}
    return found.pop() if len(found) == 1 else UNKNOWN


class Clears:
    """Whether an optimizer's `zero_grad` has been called.

    Attributes:
        used: It was, at some time.
        recent: It was, since `recent` was last set to false.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.used = self.recent = False
        self._before = vars(optimizer).get("zero_grad")
        self._zero_grad = self._wrap(optimizer.zero_grad)
        # On the object, as LR schedulers do with its `step`: torch has no hook for it.
        optimizer.zero_grad = self._zero_grad

    def _wrap(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(zero_grad)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.used = self.recent = True
            return zero_grad(*args, **kwargs)

        return call

    def parameters(self) -> list[Tensor]:
        """Return what the optimizer steps."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def remove(self) -> None:
        """Give the optimizer its method back."""
        if vars(self._optimizer).get("zero_grad") is self._zero_grad:
            if self._before is None:
                del self._optimizer.zero_grad
            else:
                self._optimizer.zero_grad = self._before


def innermost_optimizer(thing: Any) -> Any:
    """Return `thing` if it is an optimizer, the one inside if it wraps another, and else `None`."""
    found = None
    while thing is not found and hasattr(thing, "param_groups") and callable(getattr(thing, "zero_grad", None)):
        found, thing = thing, getattr(thing, "optimizer", None)
    return found


def _norms(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the 1-norm of each, on its device: no transfer yet."""
    dense = [_dense(g) for g in gradients if g is not None]
    norms = iter(torch._foreach_norm(dense, 1) if dense else [])
    return [None if g is None else next(norms) for g in gradients]


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()


def _read(norms: Sequence[Tensor | None]) -> list[float | None]:
    """Read norms, in one transfer for each device (and dtype)."""
    out: list[float | None] = [None] * len(norms)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, norm in enumerate(norms):
        if norm is not None:
            alike.setdefault((norm.device, norm.dtype), []).append((index, norm))
    for items in alike.values():
        values = torch.stack([norm for _, norm in items]).tolist()
        for (index, _), value in zip(items, values, strict=True):
            out[index] = value
    return out


def _alike(one: float, other: float | None) -> bool:
    return _same(one, other) or (other is not None and math.isclose(one, other, rel_tol=1e-6))


def _same(one: float, other: float | None) -> bool:
    return one == other or (other is not None and math.isnan(one) and math.isnan(other))


def _holds_something(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(_dense(gradient).any())
