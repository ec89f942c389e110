"""Finds out what has happened to a model's gradients since all ranks last treated them in the same way.

A joined rank holds gradients too: the last average, or gradients that it accumulated without a sync. Whether these
still count depends on the active ranks, where user code clears gradients in ways that are not announced: `zero_grad`
with either option, `p.grad = None`, `p.grad.data.zero_()`, or a new tensor. So an active rank remembers, per parameter,
the tensor (weakly: addresses are reused) and its version, and after a backward without a sync its norm and sum. Later
it infers from these which gradients were cleared. After a sync no norm is needed: joined ranks hold the average, so a
missing or zero gradient on an active rank was cleared. If nothing differs (no gradient, or zero, before and now), the
optimizer's `zero_grad` decides, if the loop uses it, and otherwise the other parameters. If these show nothing either,
the verdict is `UNKNOWN`: a joined rank that holds its own gradients asks the other active ranks, and raises if they do
not know.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_join._base.devices import read
from torch_join._base.errors import JoinError
from torch_join._base.membership import Membership
from torch_join._compat import ddp as _compat
from torch_join._control.codec import closed, foreign
from torch_join._handover.mirror import Known, is_known, known, versions
from torch_join._participants.clears import Clears
from torch_join._shadow.zero_gradient import empty_sparse

Measure = tuple[Tensor, Tensor] | None  # a gradient's 1-norm, and its sum, which alone shows a change of signs
Values = tuple[float | None, float | None]
CLEARED, KEPT, CHANGED, UNKNOWN = "cleared", "kept", "changed", "unknown"
NONE, ZERO, FULL = "none", "zero", "full"


@closed("gradient")
class State(NamedTuple):
    """What has happened to one gradient.

    Attributes:
        verdict: `CLEARED`, `KEPT`, `CHANGED` by hand, or `UNKNOWN`.
        content: The gradient's current content: `NONE`, `ZERO`, or `FULL` for anything else.
        norm: The gradient's 1-norm, if it is the kept average of all ranks.
    """

    verdict: str
    content: str
    norm: float | None = None


# Runs of equal states, with their lengths: usually all states of a model are equal.
Runs = list[tuple[State, int]]


def runs_of(states: Iterable[State]) -> Runs:
    """Return the states as runs, the form in which ranks send them."""
    return [(state, len([*same])) for state, same in groupby(states)]


def states_of(runs: Sequence[tuple[State, int]], count: int) -> list[State]:
    """Return the states that were sent as `runs`.

    Raises:
        JoinError: `runs` does not hold `count` states.
    """
    if any(number < 1 for _, number in runs) or sum(number for _, number in runs) != count:
        raise foreign("the state of gradients", f"{runs} in place of those of {count} parameters")
    return [state for state, number in runs for _ in range(number)]


def common_verdict(verdicts: Iterable[str]) -> str:
    """Return `CLEARED` or `KEPT` if there is evidence for one and none for the other, else `UNKNOWN`."""
    found = {*verdicts} & {CLEARED, KEPT}
    return found.pop() if len(found) == 1 else UNKNOWN


class Gradients:
    """The gradients of a model's parameters on one rank.

    Args:
        parameters: The parameters, or objects that have one gradient for several `parameters`.
        clears: The watches on `zero_grad` of the models, and of optimizers that may step these parameters.
        views: Whether a gradient's version also changes for other gradients in its memory, or for unused parts of it.
        sparse: The `id` of each parameter whose gradients are sparse.
        units: For each parameter, the number of the unit in which it is sharded.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        clears: Sequence[Clears] = (),
        views: bool = False,
        sparse: frozenset[int] = frozenset(),
        units: Sequence[int] | None = None,
    ) -> None:
        self.parameters = parameters
        self._are_whole = all(isinstance(p, Tensor) for p in parameters)
        self._sparse = sparse
        self._views = views
        self._units = [0] * len(parameters) if units is None else units
        self._known: list[Known] = [None] * len(parameters)
        self._measures: Sequence[Measure] = [None] * len(parameters)  # noted with `_known`; `None` after a sync
        self._clears = clears
        self._calls = [each.calls for each in clears]  # noted with `_known`
        self.begin_loop()

    def begin_loop(self) -> None:
        """Start a loop: count from here on how it clears gradients."""
        self._begin = [(each.calls, each.steps) for each in self._clears]

    def remember(self, accumulates: bool) -> None:
        """Remember the current gradients.

        Args:
            accumulates: Whether the ranks' gradients differ, because the last backward did not sync.
        """
        gradients = [p.grad for p in self.parameters]
        self._know(gradients)
        self._measures = _measure(gradients) if accumulates else [None] * len(gradients)

    def refresh(self) -> None:
        """Remember the current gradients and keep their known measures, without reading a gradient."""
        gradients = [p.grad for p in self.parameters]
        measures = [
            measure if is_known(gradient, before) else None
            for gradient, before, measure in zip(gradients, self._known, self._measures, strict=True)
        ]
        self._know(gradients)
        self._measures = measures

    def rebind(self) -> None:
        """If gradients are views, remember the current ones: new tensors with the contents of the remembered ones."""
        if not self._views:
            return
        self._known = [
            before if p.grad is None or before is None else known(p.grad)
            for p, before in zip(self.parameters, self._known, strict=True)
        ]

    def _know(self, gradients: Sequence[Tensor | None]) -> None:
        self._known = list(map(known, gradients))
        self._calls = [each.calls for each in self._clears]

    def states(self) -> list[State]:
        """Return what has happened to each gradient since it was remembered."""
        gradients = [p.grad for p in self.parameters]
        if self._are_whole and None not in self._known and not [g for g in gradients if g is not None]:
            return [State(CLEARED, NONE)] * len(gradients)  # the usual case, by `zero_grad()`
        measures = [*_measure(gradients), *self._measures]  # the current ones, then the remembered ones
        numbers = _read([value for measure in measures for value in measure or (None, None)])
        values = list(zip(numbers[::2], numbers[1::2], strict=True))
        before = values[len(gradients) :]
        found = [self._state(*each) for each in zip(gradients, self._known, values, before, strict=False)]
        if any(state.content != FULL for state in found) or any(len(_parameters(p)) > 1 for p in self.parameters):
            found = self._decide(found)
        return found

    def _state(self, gradient: Tensor | None, known: Any, now: Values, values: Values) -> State:
        (norm, total), (before, total_before) = now, values
        if gradient is None or norm is None or total is None:
            return State(UNKNOWN if known is None else CLEARED, NONE)
        content = FULL if norm != 0 else ZERO
        if known is None or known[0]() is not gradient or (known[1] != versions(gradient) and not self._views):
            # An empty shard does not show whether other ranks' shards are zero now: see `_decide`.
            is_empty = gradient.numel() > 0 and not _compat.local_part(gradient).numel()
            return State(CHANGED if content == FULL or is_empty else CLEARED, content)
        if before is None:  # an average, which joined ranks hold too
            return State(KEPT, FULL, norm) if content == FULL else State(UNKNOWN, ZERO)
        if content == ZERO:
            return State(UNKNOWN if before == 0 else CLEARED, ZERO)
        return State(KEPT if _same(norm, before) and _same(total, total_before) else CHANGED, FULL)

    def _decide(self, found: list[State]) -> list[State]:
        """Replace `UNKNOWN` if there is evidence elsewhere; a gradient of several parameters may be cleared in part.

        Raises:
            JoinError: There is no evidence in its unit, and other units' gradients were cleared without a trace.
        """
        called: dict[int, bool] = {}  # several objects may clear one parameter
        for each, calls, begin in zip(self._clears, self._calls, self._begin, strict=True):
            if each.calls > calls or each.clears_each_step(*begin):
                for p in each.parameters():
                    called[id(p)] = called.get(id(p), False) or each.calls > calls
        verdicts = {state.verdict for state in found}
        of_units: dict[int, set[str]] = {}
        for unit, state in zip(self._units, found, strict=True):
            of_units.setdefault(unit, set()).add(state.verdict)
        leaves_traces = not self._views and any(
            state.verdict == CLEARED and not is_known(p.grad, before)
            for p, state, before in zip(self.parameters, found, self._known, strict=True)
        )

        def decide(holder: Tensor, verdict: str, content: str, unit: int) -> str:
            calls_of = [called[id(p)] for p in _parameters(holder) if id(p) in called]
            has_evidence = (KEPT in of_units[unit]) != (CLEARED in of_units[unit])
            known = of_units[unit] if has_evidence else verdicts
            kept, cleared = KEPT in known, CLEARED in known
            if verdict == UNKNOWN:
                if calls_of:
                    return CLEARED if any(calls_of) else KEPT
                if cleared and not has_evidence and holder.grad is not None:
                    # While a unit is gathered (between forward and backward, after an evaluation), the module has other
                    # parameters, and code that clears their gradients does not reach this shard.
                    if leaves_traces:
                        return KEPT
                    if not _compat.local_part(holder.grad).numel():
                        raise JoinError(
                            "Gradients were cleared by hand through `.data`. This finished rank holds no part of a"
                            f" gradient of shape {tuple(holder.shape)}, nor of others in its unit, so it cannot tell"
                            " whether the active ranks cleared that gradient too. Call the optimizer's zero_grad()."
                        )
                if kept != cleared:
                    return KEPT if kept else CLEARED
                # A zero gradient existed when others were cleared. A missing one may be part of an accumulation.
                return UNKNOWN if not kept else CLEARED if content == ZERO else KEPT
            if 0 < sum(calls_of) < len(_parameters(holder)):
                return CHANGED  # some rank's shard may hold nothing of the cleared parameters
            is_cleared = verdict == CHANGED and content == ZERO and (any(calls_of) or (cleared and not kept))
            return CLEARED if is_cleared else verdict

        return [
            state._replace(verdict=decide(holder, state.verdict, state.content, unit))
            for holder, state, unit in zip(self.parameters, found, self._units, strict=True)
        ]

    def raise_if_changed(self, states: Sequence[State], members: Membership) -> None:
        """Raise if user code has changed a gradient before the next backward accumulates into it.

        Raises:
            JoinError: User code has changed a gradient, which joined ranks cannot know.
        """
        if CHANGED in (verdicts := [state.verdict for state in states]):
            where = verdicts.index(CHANGED)
            raise JoinError(
                f"A gradient (parameter {where}, of shape {tuple(self.parameters[where].shape)}) was modified by hand,"
                f" for example clipped, and then the next backward accumulated into it. Ranks {members.joined_names}"
                " have finished and cannot repeat the change. Call zero_grad() after each optimizer step, or modify"
                " gradients only right before the step; with checkpointing, pass use_reentrant=False."
            )

    def follow(self, states: Sequence[State], accumulates: bool, ask: Callable[[], str] | None) -> None:
        """Repeat on a joined rank what has happened to an active rank's gradients.

        Args:
            states: The active rank's states.
            accumulates: Whether this rank holds gradients that it accumulated without a sync.
            ask: Returns the verdict of the other active ranks; `None` if no backward comes next, which would need it.

        Raises:
            JoinError: It is unknown whether this rank's gradients were cleared.
        """
        verdict = None
        for index, (parameter, state) in enumerate(zip(self.parameters, states, strict=True)):
            if state.verdict == CHANGED or (state.verdict == KEPT and state.content == FULL):
                continue
            if state.verdict == KEPT and accumulates and parameter.grad is not None:
                continue  # zeros too: they count as used, unlike missing ones
            if state.verdict == UNKNOWN and accumulates and holds_something(parameter.grad):
                if ask is None:
                    continue
                if verdict is None:
                    verdict = ask()
                if verdict == UNKNOWN:
                    self.raise_unknown(index)
                if verdict == KEPT:
                    continue
            if state.content == NONE:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
            elif id(parameter) in self._sparse:
                parameter.grad = empty_sparse(parameter)
            else:
                parameter.grad = torch.zeros_like(parameter) if isinstance(parameter, Tensor) else parameter.zeros()

    def differing(self, states: Sequence[State], accumulates: bool) -> list[int]:
        """Return the places of averages that differ from an active rank's, so that code has changed them untraced.

        For example, `GradScaler.unscale_` leaves no trace.
        """
        if accumulates or all(state.norm is None for state in states):
            return []
        kept = [None if s.norm is None else p.grad for p, s in zip(self.parameters, states, strict=True)]
        own_norms = _read(_compat.norms(_compat.values_of(kept)))
        return [
            index
            for index, (norm, state) in enumerate(zip(own_norms, states, strict=True))
            if norm is not None and not _same(norm, state.norm, tolerance=1e-6)
        ]

    def raise_if_differing(self, states: Sequence[State], accumulates: bool, joined_mid_step: bool) -> None:
        """Raise if any averages differ (see `differing`) before the next backward accumulates into them.

        Args:
            states: The active ranks' states.
            accumulates: See `follow`.
            joined_mid_step: See `Driver`.

        Raises:
            JoinError: An average differs.
        """
        for index in self.differing(states, accumulates)[:1]:
            between = (
                " This rank ran out of batches between a forward and its backward, which it never ran. Request the"
                " next batch after the backward, or put the prefetcher inside: join.batches(prefetcher(loader)). If"
                " that forward has no backward, the gradient"
            )
            raise JoinError(
                f"On the active ranks, the gradient of parameter {index}, of shape"
                f" {tuple(self.parameters[index].shape)}, is not the average that this finished rank has, and the"
                f" next backward accumulates into it.{between if joined_mid_step else ' It'} was modified by hand"
                " (`.data`, GradScaler.unscale_), which this rank cannot see. Call zero_grad() after each optimizer"
                " step, or modify gradients only right before it."
            )

    def raise_if_lost(self, states: Sequence[State]) -> None:
        """Raise on a joined rank that holds a share of a gradient which code on an active rank has changed.

        Raises:
            JoinError: This rank holds such a share when the loop has ended.
        """
        for index, (parameter, state) in enumerate(zip(self.parameters, states, strict=True)):
            if state.verdict == CHANGED and holds_something(parameter.grad):
                raise JoinError(
                    f"A gradient (parameter {index}, of shape {tuple(parameter.shape)}) was modified by hand during"
                    " accumulation, and the loop ended before the gradient was averaged. This finished rank's share"
                    " of it was not modified. Modify gradients only right before the optimizer step."
                )

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gradient, a copy of one, or all gradients concatenated."""
        gradients = [p.grad for p in self.parameters if p.grad is not None and p.grad.layout is torch.strided]
        if tensor.layout is not torch.strided or not gradients:
            return False
        if any(tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in gradients):
            return True
        if tensor.numel() == 1 and float(tensor).is_integer():  # a count may equal a gradient by chance
            return False
        if tensor.numel() == sum(each.numel() for each in gradients):
            tensor = tensor.flatten()[: gradients[0].numel()].view_as(gradients[0])
        return any(tensor.shape == each.shape and torch.equal(tensor.to(each), each) for each in gradients)

    def raise_if_reduced(self, accumulates: bool) -> None:
        """Raise on a joined rank that holds a share of gradients which code on the active ranks reduces itself.

        Raises:
            JoinError: This rank holds such a share, which would be left out.
        """
        for index, parameter in enumerate(self.parameters if accumulates else ()):
            if holds_something(parameter.grad):
                raise JoinError(
                    "The active ranks accumulated a gradient under no_sync and reduced it by hand (parameter"
                    f" {index}, of shape {tuple(parameter.shape)}), so this finished rank's share of it would be left"
                    " out. Average it with a backward outside no_sync, or reduce it in each step."
                )

    def raise_unknown(self, index: int = 0) -> None:
        """Raise because it is unknown whether this rank's gradient of a parameter still counts.

        Raises:
            JoinError: Always.
        """
        raise JoinError(
            f"This rank finished while holding an accumulated, not yet synced gradient (parameter {index}, of shape"
            f" {tuple(self.parameters[index].shape)}), and the active ranks cannot tell whether it has been cleared"
            " since. Pass the optimizer to Join and call its zero_grad() at the start of each accumulation window, or"
            " run a backward in each step of the window."
        )


def _measure(gradients: Sequence[Tensor | None]) -> list[Measure]:
    dense = _compat.values_of(gradients)
    found = zip(dense, _compat.norms(dense), strict=True)
    return [
        None if one is None or norm is None else (norm, (torch.view_as_real(one) if one.is_complex() else one).sum())
        for one, norm in found
    ]


def _parameters(holder: Any) -> Sequence[Tensor]:
    return [holder] if isinstance(holder, Tensor) else holder.parameters


def _read(norms: Sequence[Tensor | None]) -> list[float | None]:
    values = iter(read([norm for norm in norms if norm is not None]))
    return [None if norm is None else next(values)[0] for norm in norms]


def _same(one: float, other: float | None, tolerance: float = 0.0) -> bool:
    if other is None:
        return False
    return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def holds_something(gradient: Tensor | None) -> bool:
    (values,) = _compat.values_of([gradient])
    return values is not None and bool(values.any())
