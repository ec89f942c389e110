"""Join for a loop that a framework drives: every rank runs every step, with a batch or without."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from torch_join._base import compat as _compat
from torch_join._base.errors import JoinTypeError
from torch_join._base.weighting import loss_factor
from torch_join._shadow.model import ModelShadow
from torch_join._tail.attendance import Attendance
from torch_join._tail.no_loss import NoLossCount
from torch_join._tail.steps import StepDriver
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.custom import CustomPart
from torch_join.joinables.gather import GatherPart
from torch_join.joinables.lockstep_model import LockstepModelPart


class LockstepJoin:
    """One rank's part in training on uneven inputs, for a loop in which all ranks step together.

    A rank that has run out of batches stays in the loop. In each step it runs `shadow_forward()` in
    place of a forward and goes on as if it had had a batch: it takes part in the backward all-reduce
    with zero gradients, receives the average, and steps its own optimizer and schedulers. So all
    ranks are identical after every step.

    Args:
        driver: The driver of its parts: what the active ranks do in a step, and joined ranks answer.
        model: The model's shadow.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives the step issues besides
            the model's; their main hooks run on a joined rank when the active ranks notify of them.
        **kwargs: Forwarded to every `join_hook`.

    Attributes:
        keeps_buffers: Whether each rank keeps its own buffers for now.

    Raises:
        JoinTypeError: One of `joinables` does not follow torch's protocol.
    """

    def __init__(
        self,
        driver: StepDriver,
        model: ModelShadow,
        *,
        throw_on_early_termination: bool = False,
        joinables: Sequence[Joinable] = (),
        **kwargs: Any,
    ) -> None:
        for joinable in joinables:
            if not isinstance(joinable, Joinable) or isinstance(joinable, WrappingJoinable):
                raise JoinTypeError(
                    f"joinables must be torch.distributed.algorithms.Joinable objects of your own, got"
                    f" {type(joinable).__name__}. Models, optimizers and schedulers need not be passed: in this loop"
                    " every rank steps its own."
                )
        self.driver = driver
        self.channel = driver.server.channel
        self.weighting = driver.members.weighting
        self._model = driver.add(partial(LockstepModelPart, shadow=model))
        self._throw = throw_on_early_termination
        self.gathers = self.driver.add(GatherPart)
        self._no_loss = NoLossCount(self.channel)
        self._customs = [self.driver.add(partial(CustomPart, joinable=j, options=kwargs)) for j in joinables]
        self._attendance = Attendance(self.channel.world_size)
        self._samples = self._total_samples = 0
        self.no_loss = self.in_loss_step = self.keeps_buffers = self._sends_nothing = False

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have a batch at the current step."""
        return self._attendance.active_ranks

    @property
    def joined(self) -> bool:
        """Whether this rank has no batch at the current step."""
        return self._attendance.joined(self.channel.rank)

    @property
    def in_tail(self) -> bool:
        """Whether some rank has no batch at the current step while another has one."""
        return 0 < len(self.active_ranks) < self.channel.world_size

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one in which any rank has a batch."""
        return self._attendance.is_last_step

    def begin(self, first_step: int, end: int | None, samples: int, value: Any = None) -> list[Any]:
        """Begin an epoch; all ranks meet.

        Args:
            first_step: Where the epoch begins, 0 unless it is resumed in the middle.
            end: This rank's number of batches, if it is known to be `first_step + 1` or less.
            samples: Number of samples in the first batch, 0 without one.
            value: Anything to share with the other ranks.

        Returns:
            Every rank's `value`.
        """
        for part in self._customs:
            part.renew()
        self._attendance = Attendance(self.channel.world_size, first_step)
        mine = (end, samples, value, self._shadow.fired)
        everyone = self.channel.gather(mine, of=tuple[int | None, int, Any, list[int] | None])
        for _, _, _, fired in everyone:
            self._shadow.note_fired(fired)
        if end is None or end > first_step:
            self._shadow.check_fired()
        self._attendance.announce({rank: end for rank, (end, *_) in enumerate(everyone) if end is not None})
        self._samples, self._total_samples = samples, sum(samples for _, samples, *_ in everyone)
        self._attendance.check_termination(self.channel.rank, self._throw)
        return [value for _, _, value, _ in everyone]

    def advance(self, end: int | None, samples: int, notice: dict[str, Any] | None = None) -> dict[int, dict[str, Any]]:
        """Go on to the next step; all ranks meet.

        Args:
            end: This rank's number of batches, if it has only now become known. It must be announced
                one step ahead: when the next step is the rank's last, at the latest.
            samples: Number of samples in the next step's batch, 0 without one.
            notice: Anything else to tell the other ranks, as a JSON object.

        Returns:
            The notices of the ranks that had one.
        """
        if end is not None:
            notice = {"end": end, **(notice or {})}
        beat = self.channel.beat(samples, notice)
        self.driver.after_meeting()
        self._attendance.step += 1
        self._attendance.announce({r: n["end"] for r, n in beat.notices.items() if "end" in n})
        self._samples, self._total_samples = samples, beat.total
        self._attendance.check_termination(self.channel.rank, self._throw)
        return beat.notices

    def skip(self, skips: bool) -> list[int]:
        """Leave the epoch at the current step, if `skips`, although there is a batch; all ranks meet.

        Returns:
            The ranks that leave.
        """
        samples = 0 if skips else self._samples
        beat = self.channel.beat(samples, {} if skips else None)
        self._attendance.announce(dict.fromkeys(beat.notices, self._attendance.step))
        self._samples, self._total_samples = samples, beat.total
        return list(beat.notices)

    @property
    def loss_factor(self) -> float:
        """What to multiply this rank's mean loss with before backward."""
        counts = len(self.active_ranks), self._samples, self._total_samples
        return loss_factor(self.weighting, self.channel.world_size, *counts)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Put around forward and backward of every step, shadow or not."""
        with self._shadow.step(shadow=self.joined):
            yield
        # Rank 0 writes checkpoints, and DDP broadcasts its buffers before each forward: so it must
        # always hold the newest. (Between forward and backward this would disturb autograd.)
        if self.in_tail and 0 not in self.active_ranks and not self.keeps_buffers:
            # Amid an accumulation an active rank keeps its own, as in DDP.
            own = not self.joined and not self._shadow.ddp.require_forward_param_sync
            self._shadow.sync_buffers(self.active_ranks[0], keeps=own)

    @contextmanager
    def active_step(self) -> Iterator[None]:
        """Put around an active rank's forward and whatever else its step does before backward."""
        if not self.in_tail:
            yield
            return
        with ExitStack() as plumbing, self.driver.step(self.active_ranks):
            # Until the inner module runs, the collectives are DDP's own, which a shadow forward has too.
            plumbing.enter_context(self.driver.server.own_collectives())
            inside = self._shadow.inner.register_forward_pre_hook(lambda *_: plumbing.close())
            try:
                yield
            finally:
                inside.remove()

    def shadow_forward(self) -> Tensor:
        """Run a joined rank's counterpart of a forward, and serve until the active ranks are done with theirs.

        Returns:
            A scalar zero, whose backward takes part in the gradients' all-reduce.
        """
        self.driver.derive(self._model, "forward")
        self.driver.follow(self.active_ranks)
        return self.gathers.chain(self._model.take_output())

    @contextmanager
    def loss_step(self) -> Iterator[None]:
        """Put around an active rank's forward, if its output is the step's loss, a dictionary with it, or `None`.

        It makes gathers through which gradients flow (`gathers.gather`) a part of the loss. In place of `None`
        comes a scalar zero, as from `shadow_forward`, if the other ranks need this one in backward. Then
        `no_loss` is true.
        """
        self.no_loss = self._sends_nothing = False
        if self.channel.world_size == 1:
            yield
            return
        self.in_loss_step = True
        try:
            with self._shadow.completing(self._complete):
                yield
        finally:
            self.in_loss_step = False

    def _complete(self, output: Any) -> Any:
        if output is None and (self._syncs or self.gathers.pending):
            self.no_loss = True
            # The others' losses may depend on what this rank has given to a gather.
            self._sends_nothing = not self.gathers.pending
            return self.gathers.chain(self._shadow.no_loss_output())
        if isinstance(output, Tensor):
            return self.gathers.chain(output)
        if self.gathers.pending and isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": self.gathers.chain(output["loss"])}
        return output

    def backward(self, backward: Callable[[], None]) -> bool:
        """Run the backward of a step, real or not; where no rank contributes to the gradients they are left cleared.

        Returns:
            `False` if it is known that no rank has a loss. Without a sync nobody knows.
        """
        if not (self.joined or self.no_loss):
            self._listening_to(backward)
            self._shadow.accumulated = not self._syncs
            return True
        parameters, syncs = self._shadow.parameters, self._syncs
        if syncs:
            self._no_loss.add(any(p.grad is not None for p in parameters))
        if self.joined or self._sends_nothing:
            self.driver.derive(self._model, "backward", partial(self._listening_to, backward))
        else:
            with self._shadow.step(shadow=False):
                self._listening_to(backward)
        if not syncs:
            return True
        _compat.wait_for_device(parameters[0].device.type)
        totals = self._no_loss.read()
        for parameter in () if totals.has_gradients else parameters:
            parameter.grad = None
        return totals.has_loss

    def _listening_to(self, backward: Callable[[], None]) -> None:
        with self.driver.backward() if self.in_tail and not self.joined else nullcontext():
            backward()
        self.check_reduced()

    def check_reduced(self) -> None:
        """Raise DDP's own error if the backward that has just ended left parameters out; all ranks call it."""
        if self._syncs:
            with self.driver.server.own_collectives():
                _compat.check_reduced(self._shadow.ddp)

    @property
    def _shadow(self) -> ModelShadow:
        return self._model.shadow

    @property
    def _syncs(self) -> bool:
        return bool(self._shadow.ddp.require_backward_grad_sync)

    def finish(self) -> None:
        """End the epoch: run the joinables' post-hooks."""
        self._no_loss.tidy()
        for part in self._customs:
            part.after_all(self._attendance.ended_last(self.channel.rank))

    def sync_buffers(self) -> None:
        """Give all ranks the model's newest buffers; all ranks must call it."""
        if not self.keeps_buffers:
            self._shadow.sync_buffers(0)

    def use(self, model: ModelShadow) -> None:
        """Go on with another shadow: the model has been wrapped anew."""
        self._model.shadow = model

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that require a gradient and did not when the model was wrapped."""
        return self._shadow.unfrozen()
