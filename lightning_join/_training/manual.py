"""Manual optimization: joined ranks repeat the training that runs in `training_step`.

While some rank has joined, the active ranks announce each `manual_backward` and each optimizer step, and before these
any manual changes to gradients and parameters. At the end of `training_step` they announce the schedulers.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, cast

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_join._strategy_protocol import JoiningStrategy
from torch_join import UnsupportedError
from torch_join.integration import (
    Changes,
    LockstepJoin,
    ModelShadow,
    Participant,
    StepDriver,
    StepMirror,
    group_options,
    setting,
    take_group_options,
)


class ManualParticipant(Participant):
    """The training that runs inside `training_step`, on active and joined ranks.

    Args:
        strategy: The strategy, for Lightning's own methods; its `join` knows the active ranks of each step.
        shadow: The model's shadow.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "changes": Changes,
        "backward": bool,
        "step": tuple[int, list[dict[str, Any]], dict[str, Any]],
        "end": tuple[list[Any], list[list[dict[str, Any]]]],
    }

    driver: StepDriver

    def __init__(self, driver: StepDriver, index: int, strategy: JoiningStrategy, shadow: ModelShadow) -> None:
        super().__init__(driver, index)
        self._strategy = strategy
        self._lockstep = cast(LockstepJoin, strategy.join)
        self._stepping = self._in_backward = False
        self.use(shadow)

    def use(self, shadow: ModelShadow) -> None:
        """Continue with the shadow of a rebuilt DDP model."""
        self._shadow = shadow
        self._ddp: DistributedDataParallel = shadow.ddp
        self._mirror = StepMirror(shadow.ddp)

    @property
    def is_used(self) -> bool:
        """Whether the module optimizes manually."""
        module = self._strategy.lightning_module
        return module is not None and not module.automatic_optimization

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Wrap an active rank's `training_step`."""
        if not self.is_used:
            yield
            return
        self._let_buffers_sync()
        with register_optimizer_step_pre_hook(self._refuse_raw_step):
            if self.tail_log.announces:
                self._mirror.remember()
            yield
            if self.tail_log.announces:
                self._send_changes()
                states = [config.scheduler.state_dict() for config in self._strategy.lr_scheduler_configs]
                self.announce_open("end", (states, [group_options(o) for o in self._strategy.optimizers]))

    def shadow_step(self) -> Tensor:
        """Follow the active ranks' `training_step` on a joined rank, and return a scalar zero."""
        self._let_buffers_sync()
        with setting(self._ddp, require_backward_grad_sync=False):  # no backward follows its forward
            return self._lockstep.shadow_forward()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Strategy.backward` with a weighted loss."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        precision = strategy.precision_plugin
        synced = self._ddp.require_backward_grad_sync
        is_nothing = synced and self.tail_log.channel.world_size > 1 and not self._shadow.is_reached_by(loss)
        if is_nothing:  # DDP would get no gradient, and the other ranks would wait
            loss = loss + self._shadow.no_loss_output()
        if self.tail_log.announces:
            self._send_changes(with_parameters=False)
            self.announce("backward", synced)
        if not self.members.serves and self._lockstep.loss_factor != 1.0:
            loss = loss * self._lockstep.loss_factor
        # Joined ranks run these hooks themselves. Changes to the graph are detected.
        with self.driver.tail_log.on_all_ranks():
            strategy.pre_backward(loss)
            loss = precision.pre_backward(loss, module)
        around = self._shadow.step(shadow=True) if is_nothing else self._lockstep.leaving_out()
        with setting(self, _in_backward=True), around:
            precision.backward(loss, module, None, *args, **kwargs)
        with self.driver.tail_log.on_all_ranks():
            loss = precision.post_backward(loss, module)
            strategy.post_backward(loss)
        self._shadow.first.finish_watching()
        self._lockstep.check_reduced()
        if self.tail_log.announces:
            self._mirror.after_backward(synced)
        else:
            self._mirror.before_tail(synced)
        return loss

    def before_collective(self, ddps: bool) -> None:
        if self._in_backward and not ddps:
            raise UnsupportedError(
                "A backward in manual optimization called a collective (SyncBatchNorm, or a loss over all ranks'"
                f" outputs) after ranks {self.members.joined_names} finished, which have already completed that"
                " backward. Use automatic optimization, or call the collective on detached tensors."
            )

    @contextmanager
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], options: dict[str, Any]
    ) -> Iterator[Callable[[], Any]]:
        """Wrap an optimizer step; yield the closure for it."""
        calls = 0

        def closure_and_announce() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and self.tail_log.channel.world_size > 1:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluates its closure more than once, which a finished rank cannot"
                    " follow. Use an optimizer that evaluates its closure once."
                )
            result = closure()
            if self.tail_log.announces:
                self._mirror.check_averaged([p for group in optimizer.param_groups for p in group["params"]])
                self._send_changes()
                self.announce_open(
                    "step", (self._strategy.optimizers.index(optimizer), group_options(optimizer), options)
                )
            # From here on, joined ranks run the same code.
            rest.enter_context(self.driver.tail_log.on_all_ranks())
            return result

        with setting(self, _stepping=True), ExitStack() as rest:
            yield closure_and_announce
        if self.tail_log.announces:
            self._mirror.remember()

    def mirror(self, kind: str, payload: Any) -> None:
        strategy = self._strategy
        if kind == "changes":
            self._mirror.take(payload, self.members.leader)
        elif kind == "backward":
            with setting(self._ddp, require_backward_grad_sync=payload):
                strategy.backward(self._shadow.zero(), None)
        elif kind == "step":
            index, options, arguments = payload
            take_group_options(strategy.optimizers[index], options)
            strategy._lightning_optimizers[index].step(**arguments)
        else:
            states, all_options = payload
            for config, state in zip(strategy.lr_scheduler_configs, states, strict=True):
                config.scheduler.load_state_dict(state)
            for optimizer, options in zip(strategy.optimizers, all_options, strict=True):
                take_group_options(optimizer, options)

    def _send_changes(self, with_parameters: bool = True) -> None:
        changes = self._mirror.changes(with_parameters)
        if changes:
            self.announce("changes", changes)
            with self.tail_log.own_collectives():
                self._mirror.take(changes, self.members.leader)

    def _let_buffers_sync(self) -> None:
        # DDP broadcasts buffers before a forward only if a synced backward followed the last forward. It assumes that
        # none did in manual optimization, and BatchNorm would differ between ranks.
        self._ddp.require_forward_param_sync = True

    def _refuse_raw_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping and self.tail_log.channel.world_size > 1:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() was called directly in `training_step`, where Lightning does not"
                " see it, so finished ranks would miss that step. Return the optimizer from `configure_optimizers`,"
                " and step the one that `self.optimizers()` returns."
            )
