"""`Join`: torch's context for uneven inputs, made exact."""

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin

from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.weighting import Weighting, resolve_weighting
from torch_join._collectives.tap import CollectiveTap
from torch_join._control.rendezvous import open_channel
from torch_join._handover.audit import Often
from torch_join._tail import nesting as _nesting
from torch_join._tail.loops import Loops
from torch_join.joinables import CustomPart, ModelPart, make_parts, unwrap
from torch_join.joinables.arguments import check_given, check_options, check_timeout, common_group, listed

J = TypeVar("J", bound="Join")

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Join(Loops, TorchJoin):
    """Train on uneven inputs in a plain loop, exactly.

    ```python
    with Join([ddp, optimizer, scheduler]) as join:
        for batch in join.batches(loader):
            ...
    ```

    A rank that has run out of inputs serves the others: it takes part in the gradients' all-reduce
    with zeros, and in any other collective of the step with a neutral value. When the last rank is
    done, its state (of everything given) is handed over to the others, and all leave the loop
    together. A plain `for` over the loader works too, with a heartbeat at each forward of a model.

    Args:
        joinables: DDP models, optimizers, LR schedulers, `GradScaler`s, torch `Joinable`s, and anything
            with `state_dict` and `load_state_dict`; the same on every rank, in the same order.
        enable: `False` makes the context do nothing: `batches` passes on its loader's, and every rank is active.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out of inputs before others.
        weighting: How the gradients of the active ranks are combined, see `resolve_weighting`.
        heartbeat: Whether ranks meet in each step, also where lengths are certain; needed where ranks may
            `break` out of their loops at different steps.
        timeout: How long a rank waits for another, by default 30 minutes.
        audit: In which loops to compare the ranks' states: `"tail"`, those that a rank ends early; `True`, all.
        hand_over_ignored: Whether parameters that DDP ignores are; `None`: of which all ranks held the same bytes.
        **kwargs: Forwarded to every `join_hook`; `divide_by_initial_world_size` is understood too.

    Raises:
        ValueError: `joinables` is empty, or has different process groups.
        JoinTypeError: One of them is of a type that cannot take part; or there is no such argument, and no hook that
            could take it.
        EarlyTerminationError: See `throw_on_early_termination`.
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        weighting: Weighting | None = None,
        heartbeat: bool = False,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        audit: Often = "tail",
        hand_over_ignored: bool | None = None,
        **kwargs: Any,
    ) -> None:
        joinables = [unwrap(thing) for thing in listed(joinables)]
        check_given(joinables)
        check_timeout(timeout)
        check_options(kwargs, joinables)
        weighting = resolve_weighting(weighting, kwargs.get("divide_by_initial_world_size"))
        Loops.__init__(
            self, common_group(joinables), joinables, enable, weighting, throw_on_early_termination, heartbeat
        )
        self._begin_audit(audit, hand_over_ignored)
        self._timeout = timeout
        self._options = kwargs
        if enable:
            self._make_parts()

    def __enter__(self: J) -> J:
        if self._enable:
            _nesting.enter(self)
            self._reset()
            if not self._parts:  # it has been left before
                self._make_parts()
            try:
                self._open(open_channel(self.group, self._timeout))
                self._compare_lists()
                for part in self._parts:
                    part.enter()
            except BaseException:
                self._leave_nothing()
                raise
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,  # noqa: A002  torch's name
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        try:
            with self._telling():
                if value is not None:
                    raise value
                if self._in_loop:  # left by `break`, while a variable holds its iterator
                    self._abandon(at_once=False)
                self._begin_overdue()
                self._return_to_loop()
                verdict = self._last_joiner
                self._leave()
                if self._loop_done:
                    self._last_joiner = verdict
                for part in self._parts:
                    part.after_all(self._last_joiner)
                compare(self._channel.gather(hyperparameters(self._objects), of=Hyperparameters))
                # Whoever hosts the channel's store must not be gone while others still read from it.
                if self._world_size > 1:
                    dist.barrier(self.group)
                self._channel.forget()
                self._channel.close()
        except BaseException as error:
            if error is not value:
                raise
        finally:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        self._tap.remove()
        self._awaited, self._has_said, self._left_loop = None, False, False
        self._unbegun.clear()
        for part in self._parts:
            part.exit()
        while self._clears:
            self._clears.pop().remove()
        self._channel.leave()
        _nesting.leave(self)
        self._parts, self._first_custom = [], None  # they refer to this, and it to the group, with its threads
        self._tap = CollectiveTap(lambda _: None, None)

    def _make_parts(self) -> None:
        self._tap = self._new_tap()
        self._parts = make_parts(self, self._objects, self._options)
        self._first_custom = next((p for p in self._parts if isinstance(p, CustomPart)), None)
        self._has_model = any(isinstance(p, ModelPart) for p in self._parts)
