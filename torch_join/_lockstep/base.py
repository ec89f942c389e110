"""A loop that a framework drives: every rank runs every step, with or without a batch."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.weighting import loss_factor
from torch_join._handover.buffers import Unsynced
from torch_join._lockstep.catch_up import CatchUp
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._torch.joinable import WrappingJoinable
from torch_join._participants.make_participants import custom_participant
from torch_join._participants.participant import Driver, Participant
from torch_join._schedule.active_ranks import ExchangedActiveRanks, ReadStep
from torch_join._schedule.plan import Share
from torch_join._schedule.rebalancing import Rebalancer, Source
from torch_join._shadow.synced_norms import sync_norms
from torch_join._shadow.zero_gradient import following_zero
from torch_join._tail.remarks import Remarks
from torch_join._tail.schedules import refuse_model_parallel


class Lockstep:
    """One rank's part in training on uneven inputs, in a loop in which all ranks step together.

    A rank that has run out of batches stays in the loop. In each step it runs `shadow_forward()` instead of a forward
    and continues as if it had a batch: it takes part in the collectives of the model's backward, and steps its own
    optimizer and schedulers. So all ranks are identical after every step. Subclasses define the model's step.

    Args:
        driver: Drives the participants, by which joined ranks mirror the active ranks' actions in a step.
        make_model: Makes the model's participant; called with the driver and an index.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives the step issues besides the model's. Their
            main hooks run on a joined rank when the active ranks announce these collectives.
        unsynced: Models with buffers that no wrapper synchronizes.

    Attributes:
        keeps_buffers: Whether each rank currently keeps its own buffers.
        plan: Plans which rank trains on which batch, in an epoch with rebalanced batches.
        remarks: Writes log messages about the epoch.
        no_loss: Whether this rank has a batch but no loss that depends on the model.
        no_output: Whether this rank's step has returned nothing at all.
        follows_backward: Whether joined ranks take part in each collective of the current computation's backward.

    Raises:
        JoinTypeError: One of `joinables` does not follow torch's protocol.
    """

    def __init__(
        self,
        driver: StepDriver,
        make_model: Callable[[Driver, int], Participant],
        joinables: Sequence[Joinable],
        unsynced: Sequence[Unsynced],
    ) -> None:
        for joinable in joinables:
            if not isinstance(joinable, Joinable) or isinstance(joinable, WrappingJoinable):
                raise JoinTypeError(
                    "joinables must be custom torch.distributed.algorithms.Joinable objects, got"
                    f" {type(joinable).__name__}. Do not pass models, optimizers or schedulers: each rank steps its"
                    " own in this loop."
                )
        self.driver = driver
        self.channel = driver.tail_log.channel
        self.weighting = driver.members.weighting
        self._throws = driver.options.throw_on_early_termination
        self._has_trained = False  # whether this rank has run a step with a batch
        self._model: Participant = driver.add(make_model)
        self._customs = [driver.add(partial(custom_participant, joinable=j, options={})) for j in joinables]
        self._exchanged = ExchangedActiveRanks(self.channel, self._throws)
        self.plan: Rebalancer | None = None
        self._ranks: ExchangedActiveRanks | Rebalancer = self._exchanged  # or the plan
        self._present: ExchangedActiveRanks | Rebalancer | ReadStep = self._exchanged  # or a step that was read ahead
        self.no_loss = self.no_output = self.follows_backward = self.keeps_buffers = False
        self._stepped: Sequence[Any] = ()
        self._last_read = -1  # the last step that was read ahead
        self._states = CatchUp(driver, unsynced)

    runs_placeholders = False  # whether joined ranks run the step on placeholders, since it needs all ranks

    def note_gather(self) -> None:
        """Record that the current computation has a gather through which gradients flow."""

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have a batch at the current step."""
        return self._present.active_ranks

    @property
    def joined(self) -> bool:
        """Whether this rank has no batch at the current step."""
        return self.channel.rank not in self._present.active_ranks

    @property
    def in_tail(self) -> bool:
        """Whether some ranks have finished and others are active at the current step."""
        return 0 < len(self._present.active_ranks) < self.channel.world_size

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one in which any rank has a batch."""
        return self._present.is_last_step

    def begin(
        self,
        first_step: int,
        end: int | None,
        count: float,
        value: Any = None,
        optimizers: Sequence[Any] = (),
        others: Sequence[Any] = (),
    ) -> list[Any]:
        """Start an epoch; all ranks meet.

        Args:
            first_step: The first step, 0 unless the epoch is resumed in the middle.
            end: This rank's number of batches, if it is known to be `first_step + 1` or less.
            count: The count of the first batch, 0 without one.
            value: Any value to share with the other ranks.
            optimizers: The optimizers that the framework steps in this epoch.
            others: Other objects whose state a step may change: LR schedulers.

        Returns:
            Every rank's `value`.

        Raises:
            JoinError: The optimizers' hyperparameters differ.
        """
        for each in self._customs:
            each.renew()
        active_ranks = ExchangedActiveRanks(self.channel, self._throws, first_step)
        self._exchanged = self._ranks = self._present = active_ranks
        self.driver.tail_log.step = lambda: active_ranks.step + max(0, self._last_read)
        self.plan = None
        self._stepped, self._last_read = optimizers, -1
        self._active_before: Sequence[int] = range(self.channel.world_size)  # at the step before
        self.remarks = Remarks(self.driver.members, self.driver.options, self.driver.framework, first_step)
        self._states.begin([self._whole, *optimizers, *others])
        message = (end, float(count), value, self._known(), hyperparameters(optimizers))
        answers = self.channel.gather(message, of=tuple[int | None, float, Any, list[int] | None, Hyperparameters])
        compare([options for *_, options in answers], self.channel.global_ranks)
        self._compare([known for *_, known, _ in answers], end is None or end > first_step)
        active_ranks.announce({rank: end for rank, (end, *_) in enumerate(answers) if end is not None})
        active_ranks.counted, active_ranks.total = count, math.fsum(each for _, each, *_ in answers)
        active_ranks.check_termination()
        return [value for _, _, value, *_ in answers]

    def rebalance(self, source: Source, length: int | None, **options: Any) -> None:
        """Rebalance the current epoch; all ranks meet.

        Args:
            source: This rank's batches.
            length: The number of its remaining batches, as far as known.
            **options: Options of `Rebalancing.begin`.

        Raises:
            UnsupportedError: Several ranks compute a batch together.
        """
        refuse_model_parallel(self.driver.tail_log)
        step = self._exchanged.step
        self.plan = self.driver.rebalancing.begin(self.channel, source, length, step=step, **options)
        self._ranks = self._present = self.plan or self._exchanged

    @property
    def share(self) -> Share | None:
        """The batch that this rank trains on at the current step, and its owner."""
        return self._ranks.share

    def arrive(self, end: int | None, count: float, notice: dict[str, Any] | None = None, waits: bool = True) -> bool:
        """Move to the next step, and send the other ranks this rank's message about it; all ranks call this.

        Args:
            end: This rank's number of batches, if it has just become known. It must be announced at the latest when the
                next step is the rank's last.
            count: The count of the next step's batch, 0 without one.
            notice: Anything else to send to the other ranks, as a JSON object.
            waits: Whether all ranks wait here for each other's messages; must be equal on all ranks.

        Returns:
            Whether they have waited. At the edge of a tail and inside it they do, even if `waits` is false. If all have
                a batch in this step and in the next one, the messages are received when they are needed.
        """
        self._active_before = self.active_ranks
        if end is not None:
            notice = {"end": end, **(notice or {})}
        return self._ranks.arrive(count, notice, waits or not self._forwards_alone)

    @property
    def has_met(self) -> bool:
        """Whether this rank has received all ranks' messages about the current step."""
        return self._ranks.has_met

    def meet(self) -> dict[int, dict[str, Any]]:
        """Receive all ranks' messages about the current step, unless this rank has them already.

        Returns:
            The notices of the ranks that sent one.
        """
        return self._ranks.meet()

    def go_to(self, step: ReadStep) -> None:
        """Move to a step that was read ahead; all ranks call this, in place of `arrive`."""
        self._present = step
        self._last_read += 1

    def skip(self, skips: bool) -> list[int]:
        """If `skips`, leave the epoch at the current step although this rank has a batch; all ranks meet.

        Returns:
            The ranks that leave.
        """
        count = 0 if skips else self._counts[0]
        result = self.channel.barrier(count, {} if skips else None)
        self._ranks.leave([*result.notices], count, result.total)
        return [*result.notices]

    def count_first(self, count: float) -> None:
        """Send the count of this rank's first batch, if not sent at the start of the epoch; all ranks meet."""
        self._exchanged.counted, self._exchanged.total = count, self.channel.barrier(count).total

    @property
    def batch_count(self) -> float | None:
        """The count of this rank's batch, if batches are counted."""
        return None if self.driver.members.count is None else self._present.counted

    @property
    def counts_nothing(self) -> bool:
        """Whether this rank's batch counts 0. The gradient of its mean loss, times the factor 0, may then be NaN."""
        return not self.joined and self.batch_count == 0

    @property
    def loss_factor(self) -> float:
        """The factor for this rank's mean loss before backward."""
        return loss_factor(self.weighting, self.channel.world_size, len(self.active_ranks), *self._counts)

    @property
    def _counts(self) -> tuple[float, float]:
        """The counts of this rank's batch, and of all ranks' batches in the step."""
        self._ranks.meet()
        return self._present.counted, self._present.total

    def finish(self) -> None:
        """End the epoch: run the joinables' post-hooks."""
        for each in self._customs:
            each.after_all(self.channel.rank in (self.active_ranks or self._active_before))
        if self.plan is not None:
            self.plan.end()

    def note_end(self) -> None:
        """Log the cost of the epoch, if it was uneven; called after the last of the steps that were read."""
        self.remarks.end(self._ranks.step + self._last_read + 1)

    def catch_up(self) -> None:
        """Copy the changes besides gradients of a tail to joined ranks, before they are read; all ranks call this.

        Raises:
            JoinError: The optimizers' hyperparameters differ on ranks that ran the same steps.
        """
        if self._states.lacks:
            self.sync_buffers()
            self._states.take()

    # ------------------------------------------------------------ the model's part, whose collectives are mirrored

    _device: torch.device
    _module: nn.Module

    @property
    def _whole(self) -> nn.Module:
        """The model as it is trained, in its wrapper."""
        return self._module

    @property
    def _forwards_alone(self) -> bool:
        """Whether a forward needs no other rank. If it does, it could wait for a failed rank without noticing."""
        return False

    def _known(self) -> list[int] | None:
        """Return data of this rank that the models on other ranks need at the start of an epoch."""
        return None

    def _compare(self, known: Sequence[list[int] | None], has_batch: bool) -> None:
        """Use the data that `_known` has returned on each rank."""

    def active_step(self) -> AbstractContextManager[None]:
        """Wrap an active rank's forward, and everything else that its step does before the backward."""
        self._has_trained = True
        return self.driver.step(self.active_ranks) if self.in_tail else nullcontext()

    def before_forward(self) -> AbstractContextManager[None]:
        """Wrap the part of an active rank's step before its forward, in the tail."""
        return nullcontext()

    def shadow_forward(self) -> Tensor:
        """Run a joined rank's counterpart of a forward; serve until the active ranks have finished theirs.

        Returns:
            A scalar zero, whose backward takes part in that of the active ranks.
        """
        self._follow()
        return following_zero(self._follow, self._device)

    def _follow(self) -> None:
        self.driver.follow(self.active_ranks)

    def backward(self, backward: Callable[[], None]) -> bool:
        """Run the backward of a step, on an active or a joined rank.

        Returns:
            `False` if it is known that no rank has a loss.
        """
        raise NotImplementedError

    def in_engine(self) -> AbstractContextManager[None]:
        """Wrap autograd's part of a backward, without the hooks before and after it, which all ranks run."""
        return self.driver.serving_backward(self.active_ranks) if self.in_tail and not self.joined else nullcontext()

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Wrap the forward and backward of every step, on active and on joined ranks."""
        with self._giving_buffers():
            yield
        self._sync_norms(self._module)

    @contextmanager
    def _giving_buffers(self) -> Iterator[None]:
        """Wrap a step; at its end, send joined ranks the buffers that the model itself keeps equal."""
        if self.in_tail:
            self._note_step()
            self._states.begin_step(self.active_ranks, self._has_trained)
        yield
        if self.in_tail and not self.keeps_buffers:
            self._states.give_buffers()

    def _note_step(self) -> None:
        self.remarks.note(self.active_ranks, self._ranks.step + max(0, self._last_read))

    def _sync_norms(self, model: nn.Module) -> None:
        """Send joined ranks the buffers of SyncBatchNorm after a step."""
        if self.in_tail:
            sync_norms(model, self.active_ranks[0], self.driver.members.group)

    def loss_step(self) -> AbstractContextManager[None]:
        """Wrap an active rank's forward whose output is the step's loss."""
        return nullcontext()

    def sync_buffers(self) -> None:
        """Copy the model's newest buffers to all ranks, unless each rank keeps its own; all ranks call this."""

    def check_unfrozen(self, advice: str) -> None:
        """Raise if a parameter has been trained without the other ranks' gradients; `advice` says where to unfreeze it.

        Raises:
            UnsupportedError: There is such a parameter.
        """
        if names := self.unfrozen(self._stepped):
            raise UnsupportedError(
                f"{len(names)} parameters ({names[0]}, ...) were unfrozen in the middle of an epoch, so DDP does not"
                f" average their gradients. Unfreeze them {advice}."
            )

    def unfrozen(self, optimizers: Iterable[Any]) -> list[str]:
        """Return the names of the trained parameters that the wrapped model does not average.

        These were frozen when the model was wrapped, or were added since and are stepped by one of the optimizers;
        copies of parameters are not.
        """
        return []
