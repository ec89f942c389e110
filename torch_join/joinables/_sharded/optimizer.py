"""An optimizer of sharded parameters: a joined rank owns a part of its state too, and steps it like the others."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch

from torch_join._base import compat as _compat
from torch_join._base.errors import UnsupportedError
from torch_join._base.hyperparameters import take_hyperparameters
from torch_join.joinables._gradients.verdicts import Runs
from torch_join.joinables._sharded.model import ShardedModelPart
from torch_join.joinables.part import Driver, Part

Options = list[dict[str, Any]]  # of each group, without its parameters


class ShardedStepPart(Part):
    """An optimizer whose parameters belong to given sharded models.

    Args:
        driver: What it belongs to.
        index: The part's.
        optimizer: The optimizer; of one that wraps another (Accelerate's), the innermost.
        models: The parts of all sharded models.

    Raises:
        UnsupportedError: Other parameters are among its own; or it is LBFGS.
    """

    kinds: ClassVar[dict[str, Any]] = {"step": tuple[Options, list[Runs]], "options": Options}
    closing: ClassVar[Any] = Options

    def __init__(self, driver: Driver, index: int, optimizer: Any, models: Sequence[ShardedModelPart]) -> None:
        super().__init__(driver, index)
        self.optimizer = optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS of sharded parameters: it runs its closure as often as values of its own tell it to, which ranks"
                " that have joined do not know. Use an optimizer that runs it once."
            )
        owned = {id(p): model for model in models for unit in model.following.units for p in unit.registered}
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        other = [p for p in mine if p.requires_grad and id(p) not in owned]
        if other:
            raise UnsupportedError(
                f"{type(optimizer).__name__} steps parameters of a sharded model and {len(other)} others (the first of"
                f" shape {tuple(other[0].shape)}). A rank that has joined steps its shards itself, but gets replicated"
                " parameters from another rank at the end. Give them an optimizer each, and Join every model."
            )
        self._sharded = [model for model in models if any(owned.get(id(p)) is model for p in mine)]
        self._stepping = ExitStack()

    def enter(self) -> None:
        for model in self._sharded:
            model.before_reductions.append(self._say_options)
            self._undo.append(partial(model.before_reductions.remove, self._say_options))
        self._undo.append(self.optimizer.register_step_pre_hook(self._before_step).remove)
        self._undo.append(self.optimizer.register_step_post_hook(self._after_step).remove)

    # ------------------------------------------------------------ on an active rank

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.members.serves or not self.server.in_tail or any(model.following.reduces for model in self._sharded):
            return None  # a joined rank's own reduction steps it too
        optimizer, *positional = args  # torch passes the optimizer among them
        closure = positional[0] if positional else kwargs.get("closure")
        if closure is None:
            self._send()
            return None
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, self._once(closure), *positional[1:]), rest

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        has_run = False

        def closure_and_send() -> Any:
            nonlocal has_run
            if has_run:
                raise UnsupportedError(
                    f"{type(self.optimizer).__name__} runs its closure more than once in a step, and decides by values"
                    " of one rank's shards, which ranks that have joined do not know. Use an optimizer that runs it"
                    " once, or give every rank the same number of batches."
                )
            has_run = True
            with torch.enable_grad():
                loss = closure()
            self._send()
            return loss

        return closure_and_send

    def _send(self) -> None:
        self.announce_open("step", (self._options(), [model.check() for model in self._sharded]))
        self._stepping.enter_context(self.server.own_collectives())  # until the step is over

    def _after_step(self, *_: Any) -> None:
        self._stepping.close()
        for model in self._sharded:
            if self.members.announces or not model.at_top:
                model.contents.remember()

    def _say_options(self) -> None:
        """Tell joined ranks the hyperparameters, for a step inside of the next reduction."""
        if any(_compat.steps_in_backward(p) for group in self.optimizer.param_groups for p in group["params"]):
            self.announce("options", self._options())

    def before_all_ranks(self) -> None:
        self.announce("options", self._options())

    def _options(self) -> Options:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    # ------------------------------------------------------------ on a joined rank

    def answer(self, kind: str, payload: Any) -> None:
        if kind == "options":
            self._take(payload)
            return
        options, states = payload
        self._take(options)
        for model, runs in zip(self._sharded, states, strict=True):
            model.take(runs)
        self.optimizer.step()

    def _take(self, options: Options) -> None:
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            take_hyperparameters(group, values)

    def closing_message(self) -> Options:
        return self._options()

    def close(self, message: Options, source: int) -> None:
        if self.members.rank != source:
            self._take(message)
