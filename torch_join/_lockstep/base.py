"""A loop that a framework drives: every rank runs every step, with a batch or without."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.devices import on_device
from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.weighting import loss_factor
from torch_join._control.reports import BarrierResult
from torch_join._handover.buffers import StepBuffers, Unsynced
from torch_join._lockstep.catch_up import CatchUp
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants._torch.joinable import WrappingJoinable
from torch_join._participants.make_participants import custom_participant
from torch_join._participants.participant import Driver, Participant
from torch_join._schedule.active_ranks import ExchangedActiveRanks, ReadStep
from torch_join._schedule.plan import Share
from torch_join._schedule.rebalancer import Rebalancer, Source
from torch_join._shadow.synced_norms import sync_norms
from torch_join._shadow.zero_gradient import following_zero
from torch_join._tail.planned import refuse_model_parallel
from torch_join._tail.remarks import Remarks


class Lockstep:
    """One rank's part in training on uneven inputs, for a loop in which all ranks step together.

    A rank that has run out of batches stays in the loop. In each step it runs `shadow_forward()` in
    place of a forward and goes on as if it had had a batch: it takes part in what the model's backward does
    with others, and steps its own optimizer and schedulers. So all ranks are identical after every step.
    What a model's step is, a subclass knows.

    Args:
        driver: The driver of its participants: what the active ranks do in a step, and joined ranks mirror.
        make_model: Makes the model's participant; gets the driver and an index.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives the step issues besides
            the model's; their main hooks run on a joined rank when the active ranks notify of them.
        unsynced: Models with buffers that no wrapper keeps alike.

    Attributes:
        keeps_buffers: Whether each rank keeps its own buffers for now.
        plan: What plans whose batch each rank trains on, in an epoch in which batches are rebalanced.
        remarks: What is said of the epoch in the log.
        no_loss: Whether this rank has a batch and no loss that depends on the model.
        no_output: Whether it has returned nothing at all.
        follows_backward: Whether joined ranks take part in each collective of the backward of what is computed now.

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
                    f"joinables must be torch.distributed.algorithms.Joinable objects of your own, got"
                    f" {type(joinable).__name__}. Models, optimizers and schedulers need not be passed: in this loop"
                    " every rank steps its own."
                )
        self.driver = driver
        self.channel = driver.tail_log.channel
        self.weighting = driver.members.weighting
        self._throws = driver.options.throw_on_early_termination
        self._buffers = StepBuffers(unsynced, self.channel, driver.members.group, driver.options.hand_over_buffers)
        self._has_trained = False  # this rank has run a step of its own
        self._model: Participant = driver.add(make_model)
        self._customs = [driver.add(partial(custom_participant, joinable=j, options={})) for j in joinables]
        self._exchanged = ExchangedActiveRanks(self.channel, self._throws)
        self.plan: Rebalancer | None = None
        self._ranks: ExchangedActiveRanks | Rebalancer = self._exchanged  # or the plan
        self._present: ExchangedActiveRanks | Rebalancer | ReadStep = self._exchanged  # or what was read ahead
        self.no_loss = self.no_output = self.follows_backward = self.keeps_buffers = False
        self._stepped: Sequence[Any] = ()
        self._gone_to = -1  # the last step that was read ahead
        self._states = CatchUp(driver)

    runs_placeholders = False  # on a joined rank, where the model's step needs all ranks

    def note_gather(self) -> None:
        """Note that a gather through which gradients flow is part of what is computed now."""

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
        """Whether some rank has no batch at the current step while another has one."""
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
        """Begin an epoch; all ranks meet.

        Args:
            first_step: Where the epoch begins, 0 unless it is resumed in the middle.
            end: This rank's number of batches, if it is known to be `first_step + 1` or less.
            count: What the first batch counts, 0 without one.
            value: Anything to share with the other ranks.
            optimizers: Those that the framework steps in this epoch.
            others: What else has a state that a step may change: LR schedulers.

        Returns:
            Every rank's `value`.

        Raises:
            JoinError: The optimizers' hyperparameters differ.
        """
        for each in self._customs:
            each.renew()
        self._buffers.begin()
        active_ranks = ExchangedActiveRanks(self.channel, self._throws, first_step)
        self._exchanged = self._ranks = self._present = active_ranks
        self.driver.tail_log.step = lambda: active_ranks.step + max(0, self._gone_to)
        self.plan = None
        self._stepped, self._gone_to = optimizers, -1
        self.remarks = Remarks(self.driver.members, self.driver.options, self.driver.framework, first_step)
        self._states.begin([self._whole, *optimizers, *others])
        mine = (end, float(count), value, self._known(), hyperparameters(optimizers))
        everyone = self.channel.gather(mine, of=tuple[int | None, float, Any, list[int] | None, Hyperparameters])
        compare([options for *_, options in everyone], self.channel.global_ranks)
        self._compare([known for *_, known, _ in everyone], end is None or end > first_step)
        active_ranks.announce({rank: end for rank, (end, *_) in enumerate(everyone) if end is not None})
        active_ranks.counted, active_ranks.total = count, math.fsum(theirs for _, theirs, *_ in everyone)
        active_ranks.check_termination()
        return [value for _, _, value, *_ in everyone]

    def rebalance(self, source: Source, length: int | None, **options: Any) -> None:
        """Rebalance the epoch that has begun; all ranks meet.

        Args:
            source: This rank's batches.
            length: How many there are from here on, as far as is known.
            **options: Of `Rebalancing.begin`.

        Raises:
            UnsupportedError: Several ranks compute a batch together.
        """
        refuse_model_parallel(self.driver.tail_log)

        def meet(count: float, notice: dict[str, Any]) -> BarrierResult:
            return self.channel.barrier(count, notice or None)

        step = self._exchanged.step
        self.plan = self.driver.rebalancing.begin(self.channel, source, length, meet, step=step, **options)
        self._ranks = self._present = self.plan or self._exchanged

    @property
    def share(self) -> Share | None:
        """Whose batch this rank trains on at the current step."""
        return self._ranks.share

    def arrive(self, end: int | None, count: float, notice: dict[str, Any] | None = None, waits: bool = True) -> bool:
        """Go on to the next step, and say what the others need to know of it; all ranks call this.

        Args:
            end: This rank's number of batches, if it has only now become known. It must be announced
                one step ahead: when the next step is the rank's last, at the latest.
            count: What the next step's batch counts, 0 without one.
            notice: Anything else to tell the other ranks, as a JSON object.
            waits: Whether all ranks wait here until they have heard each other; the same on all.

        Returns:
            Whether they have: also where `waits` is false, at the edge of a tail and inside. Where all have a batch, in
            the step that ends and in the next one, others are heard when something of what they say is needed.
        """
        if end is not None:
            notice = {"end": end, **(notice or {})}
        return self._ranks.arrive(count, notice, waits or not self._forwards_alone)

    @property
    def has_met(self) -> bool:
        """Whether this rank has heard what all ranks have said of the current step."""
        return self._ranks.has_met

    def meet(self) -> dict[int, dict[str, Any]]:
        """Hear what all ranks have said of the current step, unless this rank has.

        Returns:
            The notices of the ranks that had one.
        """
        return self._ranks.meet()

    def go_to(self, step: ReadStep) -> None:
        """Go on to a step that was read ahead; all ranks call this, in place of `arrive`."""
        self._present = step
        self._gone_to += 1

    def skip(self, skips: bool) -> list[int]:
        """Leave the epoch at the current step, if `skips`, although there is a batch; all ranks meet.

        Returns:
            The ranks that leave.
        """
        count = 0 if skips else self._counts[0]
        result = self.channel.barrier(count, {} if skips else None)
        self._ranks.leave([*result.notices], count, result.total)
        return [*result.notices]

    def count_first(self, count: float) -> None:
        """Say what this rank's first batch counts, where that was not said as the epoch began; all ranks meet."""
        self._exchanged.counted, self._exchanged.total = count, self.channel.barrier(count).total

    @property
    def counts_nothing(self) -> bool:
        """Whether this rank's batch counts 0: then the gradient of its mean, times the factor of 0, may be NaN."""
        return self.driver.members.count is not None and not self.joined and self._present.counted == 0

    @property
    def loss_factor(self) -> float:
        """What to multiply this rank's mean loss with before backward."""
        return loss_factor(self.weighting, self.channel.world_size, len(self.active_ranks), *self._counts)

    @property
    def _counts(self) -> tuple[float, float]:
        """What this rank's batch counts, and what all of the step do."""
        self._ranks.meet()
        return self._present.counted, self._present.total

    def finish(self) -> None:
        """End the epoch: run the joinables' post-hooks."""
        for each in self._customs:
            each.after_all(self._present.ended_last(self.channel.rank))
        if self.plan is not None:
            self.plan.end()
        self._buffers.end()

    def note_end(self) -> None:
        """Say in the log what the epoch has cost, if it was uneven; all steps that were read are over."""
        self.remarks.end(self._ranks.step + self._gone_to + 1)

    def catch_up(self) -> None:
        """Take what the steps of a tail have changed besides gradients, where it may be read; all ranks call this.

        Raises:
            JoinError: The optimizers' hyperparameters differ on ranks that had the same steps.
        """
        if self._states.lacks:
            self.sync_buffers()
            self._states.take()

    # ------------------------------------------------------------ the model's; what it does with others is followed

    _device: torch.device
    _module: nn.Module

    @property
    def _whole(self) -> nn.Module:
        """The model as it is trained, in its wrapper."""
        return self._module

    @property
    def _forwards_alone(self) -> bool:
        """Whether a forward needs no other rank. Else it would wait for one that has failed, and hear of nothing."""
        return False

    def _known(self) -> list[int] | None:
        """Return what the other ranks' models must know when an epoch begins."""
        return None

    def _compare(self, known: Sequence[list[int] | None], has_batch: bool) -> None:
        """Take what the ranks know."""

    def active_step(self) -> AbstractContextManager[None]:
        """Put around an active rank's forward and whatever else its step does before backward."""
        self._has_trained = True
        return self.driver.step(self.active_ranks) if self.in_tail else nullcontext()

    def before_forward(self) -> AbstractContextManager[None]:
        """Put around what an active rank's step does before its forward, in the tail."""
        return nullcontext()

    def shadow_forward(self) -> Tensor:
        """Run a joined rank's counterpart of a forward, and serve until the active ranks are done with theirs.

        Returns:
            A scalar zero, whose backward takes part in that of the active ranks.
        """
        self._follow()
        return following_zero(self._follow, self._device)

    def _follow(self) -> None:
        self.driver.follow(self.active_ranks)

    def backward(self, backward: Callable[[], None]) -> bool:
        """Run the backward of a step, real or not.

        Returns:
            `False` if it is known that no rank has a loss.
        """
        raise NotImplementedError

    def in_engine(self) -> AbstractContextManager[None]:
        """Put around autograd's part of a backward, without the hooks before and after it, which all ranks run."""
        return self.driver.serving_backward(self.active_ranks) if self.in_tail and not self.joined else nullcontext()

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Put around forward and backward of every step, shadow or not."""
        with self._giving_buffers():
            yield
        self._sync_norms(self._module)

    @contextmanager
    def _giving_buffers(self) -> Iterator[None]:
        """Put around a step: joined ranks then hold what the model keeps alike itself."""
        if self.in_tail:
            self._note_step()
            self._states.begin_step(self.active_ranks)
        if self.in_tail and not self.keeps_buffers:
            self._buffers.look(self._has_trained)
        yield
        if self.in_tail and not self.keeps_buffers:
            with on_device(self.driver.members.group):
                self._buffers.give(self.active_ranks)

    def _note_step(self) -> None:
        self.remarks.note(self.active_ranks, self._ranks.step + max(0, self._gone_to))

    def _sync_norms(self, model: nn.Module) -> None:
        """Give joined ranks the buffers of SyncBatchNorm as they are after a step."""
        if self.in_tail:
            sync_norms(model, self.active_ranks[0], self.driver.members.group)

    def loss_step(self) -> AbstractContextManager[None]:
        """Put around an active rank's forward whose output is the step's loss."""
        return nullcontext()

    def sync_buffers(self) -> None:
        """Give all ranks the model's newest buffers, if it does not leave each rank its own; all ranks call it."""

    def check_unfrozen(self, advice: str) -> None:
        """Raise if a parameter has been trained without the other ranks' gradients; `advice` is where to unfreeze it.

        Raises:
            UnsupportedError: So it is.
        """
        if names := self.unfrozen(self._stepped):
            raise UnsupportedError(
                f"{len(names)} parameters ({names[0]}, ...) were unfrozen in the middle of an epoch, where DDP does not"
                f" average their gradients. Unfreeze them {advice}."
            )

    def unfrozen(self, optimizers: Iterable[Any]) -> list[str]:
        """Return the names of the parameters that train, and that the model does not average since it was wrapped.

        Those are what was frozen then; and what was not there and one of these optimizers steps, as none does a copy.
        """
        return []
