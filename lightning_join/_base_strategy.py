"""The common part of this package's strategies: everything except running a model's step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from lightning_join import _compat
from lightning_join._checks import check_module, check_optimizers, check_packages
from lightning_join._collectives import active_places, is_mean, neutral
from lightning_join._logging.step_values import StepValues, counting_nothing
from lightning_join._loops.resuming import load_in_one_process
from lightning_join._loops.takeover import take_over
from lightning_join._reading.samplers import mark_injected, without_padding
from lightning_join._strategy_protocol import JoiningStrategy
from lightning_join._training.joinables import all_joinables, run_post_hooks_in_one_process
from torch_join import JoinTypeError, UnsupportedError, Weighting
from torch_join.integration import (
    Channel,
    ModuleMetrics,
    Options,
    Placeholder,
    PlaceholderLockstep,
    StepDriver,
    open_channel,
    refuse_misspelt,
    runs_in_ray,
    use_device,
    warn_renamed,
)

# Attributes that exist only in a run. Pickles and copies of a strategy, and of objects that refer to it, omit them.
_OF_A_RUN = (
    *("channel", "driver", "join", "metrics", "step_values", "_manual"),
    *("sets_up", "gathers_alike", "around_step"),
)
# Arguments of `Join` that would otherwise go to DDP, and their replacements.
_OF_OTHER_LOOPS = {
    "may_break": "Set trainer.should_stop, which ends the loop on all ranks together",
    "monitor": "Add a lightning_join.JoinMonitor to the callbacks",
    "audit": "The strategy always compares all ranks' state in each epoch",
}


class Joining(JoiningStrategy):
    """A strategy that trains exactly on uneven dataloaders; `DDPJoinStrategy` describes its arguments."""

    # Restores the plain strategy that a `JoinCallback` has replaced.
    undo: Callable[[], None] | None = None
    # Names in Lightning's messages, and the names to use instead.
    _remedies: ClassVar[dict[str, str]] = {}
    _timeout: timedelta | None
    monitored = False  # whether a monitor watches the fit that starts
    own_shards = False

    # The user's options, read-only because they must be equal on all ranks.
    weighting = property(attrgetter("options.weighting"))
    throw_on_early_termination = property(attrgetter("options.throw_on_early_termination"))
    enable_join = property(attrgetter("options.enable"))  # until 0.3.0
    backward_collectives = property(attrgetter("options.backward_collectives"))
    rebalance = property(attrgetter("options.rebalance"))
    hand_over_buffers = property(attrgetter("options.hand_over_buffers"))

    def __init__(
        self,
        *args: Any,
        weighting: Weighting | None = Options.weighting,
        divide_by_initial_world_size: bool | None = None,
        throw_on_early_termination: bool = False,
        enable: bool = True,
        joinables: Sequence[Joinable] = (),
        backward_collectives: bool = False,
        rebalance: bool = False,
        placeholder: Placeholder | None = None,
        hand_over_buffers: bool | None = None,
        own_shards: bool = False,
        enable_join: bool | None = None,  # the old name of `enable`, which configurations use
        **kwargs: Any,
    ) -> None:
        refuse_misspelt(*kwargs, owner=type(self).__name__, also=("own_shards",))
        for name in kwargs.keys() & _OF_OTHER_LOOPS.keys():
            raise JoinTypeError(f"A strategy of Lightning's Trainer takes no {name!r}. {_OF_OTHER_LOOPS[name]}.")
        super().__init__(*args, **kwargs)
        if enable_join is not None:
            warn_renamed("enable_join", "enable", both=enable_join and not enable)
            enable = enable_join
        self.joinables, self.own_shards = tuple(joinables), own_shards
        timeout = Options.timeout if self._timeout is None else self._timeout
        self.options = Options.of(locals())
        if enable:
            self.check_arguments()

    def check_arguments(self) -> None:
        """Raise if the strategy's arguments request an unsupported feature."""

    def __getstate__(self) -> dict[str, Any]:
        without = (*_OF_A_RUN, "batch_to_device", "process_dataloader")  # set on the instance in a fit and a setup
        return {name: value for name, value in super().__getstate__().items() if name not in without}

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """The environment that defines the ranks: under Ray Train always Ray's, because Lightning's ignore Ray."""
        return cast(ClusterEnvironment | None, vars(self)["cluster_environment"])

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        if type(environment).__module__.startswith(("lightning.pytorch.", "lightning.fabric.")) and runs_in_ray():
            from ray.train.lightning import RayLightningEnvironment

            environment = RayLightningEnvironment()
        vars(self)["cluster_environment"] = environment

    @property
    def root_device(self) -> torch.device:
        if _compat.is_rays(self.cluster_environment):
            from ray.train.torch import get_device

            return cast(torch.device, get_device())
        return super().root_device  # type: ignore[safe-super]

    def setup_environment(self) -> None:
        super().setup_environment()
        self.keep_own_shards()
        if self.options.enable:
            self.begin_joining()

    def keep_own_shards(self) -> None:
        """Keep the trainer from sharding dataloaders, before a `setup` hook can make it set them up."""
        if self.own_shards and (trainer := _compat.trainer_of(self.lightning_module)) is not None:
            _compat.connector(trainer).use_distributed_sampler = False

    def begin_joining(self) -> None:
        """Take over the trainer's loops and open the channel, after the process group exists.

        With one process, nothing is taken over: the strategy behaves like plain `ddp`. It also does this if the user
        sets up the environment outside of a run, without a model or a trainer.
        """
        trainer = _compat.trainer_of(self.lightning_module)
        if trainer is None:
            return
        assert self.lightning_module is not None
        check_packages(trainer)
        if self.world_size == 1:
            return
        check_module(self.lightning_module)
        take_over(trainer, self)
        use_device(self.root_device, None)  # before the channel, which may depend on it
        self.channel = open_channel(timeout=self._timeout or self.options.timeout)
        self.sets_up = True
        self.driver = StepDriver(self.channel, self.options, extract_batch_size)
        self.driver.framework = "lightning.pytorch"
        self.step_values = self.driver.add(partial(StepValues, strategy=self))

    def setup(self, trainer: "Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.meet_in_set_up()
        super().setup(trainer)
        if self.driver is not None:
            if fitting:
                check_optimizers(self.optimizers)
            assert self.lightning_module is not None
            self.metrics = self.driver.add(partial(ModuleMetrics, module=self.lightning_module))

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Strategy.backward`; joined ranks may take part in the autograd part of it."""
        if self.join is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        # Lightning's own code, except that autograd's part is wrapped. Joined ranks repeat the collectives of hooks.
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        with self.join.in_engine():
            precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @property
    def batch_owner(self) -> int | None:
        """The rank whose batch this rank trains on in the current step: with `rebalance`, possibly another rank."""
        share = self.join.share if self.join is not None else None
        return None if share is None else share.owner

    @property
    def owner_batch_idx(self) -> int | None:
        """The current batch's index among `batch_owner`'s batches in this epoch; `batch_idx` without `rebalance`."""
        share = self.join.share if self.join is not None else None
        return None if share is None else share.batch_idx

    def take_joinables(self) -> list[Joinable]:
        """Return the user's joinables; all ranks call this. A single process also prepares to run their post-hooks."""
        assert self.lightning_module is not None
        joinables = all_joinables(self.joinables, self.lightning_module, self.channel, self.monitored)
        if self.world_size == 1 and _compat.trainer_of(self.lightning_module) is not None:
            run_post_hooks_in_one_process(self.lightning_module.trainer.callbacks, joinables)  # type: ignore[attr-defined]
        return joinables

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs = super().distributed_sampler_kwargs
        if _compat.is_rays(self.cluster_environment):  # where Lightning's count only this worker's devices
            kwargs |= {"num_replicas": self.world_size, "rank": self.global_rank}
        if self.options.enable and (trainer := _compat.trainer_of(self.lightning_module)) is not None:
            mark_injected(kwargs, trainer.predicting)
        return kwargs

    def process_dataloader(self, dataloader: object) -> object:
        return without_padding(super().process_dataloader(dataloader))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        trainer = _compat.trainer_of(self.lightning_module)
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fits and self.options.enable and self.world_size == 1:
            load_in_one_process(checkpoint)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # With a `JoinCallback`, the user's strategy is a plain one, so Lightning's advice is right.
        for plain, own in self._remedies.items() if self.undo is None else ():
            exception.args = tuple(arg.replace(plain, own) if isinstance(arg, str) else arg for arg in exception.args)
        self.channel.fail(exception)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.end_joining()
            # Lightning tears down no callback after an exception. (Without one, the module may not be attached yet.)
            undo, trainer = self.undo, _compat.trainer_of(self.lightning_module)
            if undo is not None and trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED:
                undo()

    def end_joining(self) -> None:
        """Undo every change that was made for joining; a second call does nothing."""
        if self.driver is not None:
            self.driver.close()
        self.channel.close()
        for name in _OF_A_RUN:
            vars(self).pop(name, None)

    # ------------------------------------------------------------ active ranks, and collectives

    def run_step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `training_step` on a batch or, on a finished rank, on a placeholder, without logging its values."""
        assert self.join is not None
        assert self.lightning_module is not None
        with self.join.active_step(), counting_nothing(self) if self.join.joined else nullcontext():
            output = own(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            raise UnsupportedError(
                "training_step returned None, but with placeholder= every rank must return a loss in each step."
                " Return a zero loss that depends on the model's output (`0.0 * output.sum()`), or remove such"
                " batches from the dataloader."
            )
        return output

    @property
    def all_call(self) -> bool:
        in_step = isinstance(self.join, PlaceholderLockstep) and self.join.in_step
        return in_step or self.evaluated_by is not None

    @property
    def in_placeholder(self) -> bool:
        ranks = self.find_step_ranks() if self.all_call else None
        return ranks is not None and self.global_rank not in ranks

    def find_step_ranks(self) -> tuple[int, ...] | None:
        if self.evaluated_by is not None:
            return self.evaluated_by if len(self.evaluated_by) < self.world_size else None
        if self.all_call and self.join is not None and self.join.in_tail:
            return self.join.active_ranks
        return super().find_step_ranks()

    @property
    def meets_over(self) -> Channel | None:
        """The channel on which the ranks can meet; `None` outside of a run."""
        return self.channel if self.driver is not None else None

    def check_backward(self, over_all: bool) -> None:
        if over_all and self.join is not None and self.join.follows_backward:
            self.join.note_gather()
        elif self.find_step_ranks() is not None:
            raise UnsupportedError(
                f"all_gather(sync_grads=True) was called in {'manual optimization' if over_all else 'another group'}."
                " While some rank has finished, it needs automatic optimization and the group of all ranks. Gather"
                " detached tensors (sync_grads=False)."
            )

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks like `DDPStrategy.reduce`, but with an exact mean of integers.

        Lightning truncates that mean: for batch sizes 10 and 25, it returns 17. Here the mean is a float64.
        """
        if not self.options.enable or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]
        averages = is_mean(reduce_op)
        if averages and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.double()
        ranks = self.find_step_ranks()
        if self.in_placeholder:
            tensor = neutral(tensor, reduce_op)
        if averages and ranks is not None:
            return super().reduce(tensor, group, "sum") / len(active_places(ranks, group))  # type: ignore[safe-super]
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def meet_in_set_up(self) -> None:
        """Wait for all ranks during set-up, on the channel: it reports a failed rank where a collective would hang."""
        if self.sets_up:
            self.channel.gather(None)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.meet_in_set_up()
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.meet_in_set_up()
        return super().broadcast(obj, src)  # type: ignore[safe-super]

    def __repr__(self) -> str:
        # Appears in the error with which the other package's trainer refuses this object.
        return f"<lightning_join.{type(self).__name__}, for the Trainer of `from lightning.pytorch import Trainer`>"
