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
from torch_join._tail.lossless import LosslessCount
from torch_join._tail.step_server import StepServer
from torch_join.joinables import CustomPart, GatherPart
from torch_join.joinables._torch.joinable import WrappingJoinable


class LockstepJoin:
    """One rank's part in training on uneven inputs, for a loop in which all ranks step together.

    A rank that has run out of batches stays in the loop. In each step it runs `shadow_forward()` in
    place of a forward and goes on as if it had had a batch: it takes part in the backward all-reduce
    with zero gradients, receives the average, and steps its own optimizer and schedulers. So all
    ranks are identical after every step.

    Args:
        server: Serves what the active ranks do in a step besides the model's forward and backward.
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
        server: StepServer,
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
        self.server = server
        self.channel = server.channel
        self.weighting = server.weighting
        self._model = model
        self._throw = throw_on_early_termination
        self.gathers = self.server.add(GatherPart)
        self._lossless = LosslessCount(self.channel)
        self._customs = [self.server.add(partial(CustomPart, joinable=j, options=kwargs)) for j in joinables]
        self._attendance = Attendance(self.channel.world_size)
        self._samples = self._total_samples = 0
        self.lossless = self.in_loss_step = self._sends_nothing = False
        self.keeps_buffers = False

    @property
    def step(self) -> int:
        """The current step, counted from the epoch's start."""
        return self._attendance.step

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
        mine = (end, samples, value, self._model.fired)
        everyone = self.channel.gather(mine, of=tuple[int | None, int, Any, list[int] | None])
        for _, _, _, fired in everyone:
            self._model.note_fired(fired)
        if end is None or end > first_step:
            self._model.check_fired()
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
        self.server.met()
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
        self._attendance.announce(dict.fromkeys(beat.notices, self.step))
        self._samples, self._total_samples = samples, beat.total
        return list(beat.notices)

    @property
    def loss_factor(self) -> float:
        """What to multiply this rank's mean loss with before backward."""
        return loss_factor(
            self.weighting,
            self.channel.world_size,
            len(self.active_ranks),
            self._samples,
            self._total_samples,
        )

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Put around forward and backward of every step, shadow or not."""
        with self._model.step(shadow=self.joined):
            yield
        # Rank 0 writes checkpoints, and DDP broadcasts its buffers before each forward: so it must
        # always hold the newest. (Between forward and backward this would disturb autograd.)
        if self.in_tail and 0 not in self.active_ranks and not self.keeps_buffers:
            own = not self.joined and not self._model.ddp.require_forward_param_sync  # amid an accumulation, as in DDP
            self._model.sync_buffers(self.active_ranks[0], keeps=own)

    @contextmanager
    def active_step(self) -> Iterator[None]:
        """Put around an active rank's forward and whatever else its step does before backward."""
        if not self.in_tail:
            yield
            return
        with ExitStack() as plumbing, self.server.step(self.active_ranks):
            # Until the inner module runs, the collectives are DDP's own, which a shadow forward has too.
            plumbing.enter_context(self.server.own_collectives())
            inside = self._model.inner.register_forward_pre_hook(lambda *_: plumbing.close())
            try:
                yield
            finally:
                inside.remove()

    def shadow_forward(self) -> Tensor:
        """Run a joined rank's counterpart of a forward, and serve until the active ranks are done with theirs.

        Returns:
            A scalar zero, whose backward takes part in the gradients' all-reduce.

        """
        zero = self._model.forward()
        self.server.serve(self.active_ranks)
        return self.gathers.tie(zero)

    @contextmanager
    def loss_step(self) -> Iterator[None]:
        """Put around an active rank's forward, if its output is the step's loss, a dictionary with it, or `None`.

        It makes gathers through which gradients flow (`gathers.gather`) a part of the loss. In place of `None`
        comes a scalar zero, as from `shadow_forward`, if the other ranks need this one in backward. Then
        `lossless` is true.
        """
        self.lossless = self._sends_nothing = False
        if self.channel.world_size == 1:
            yield
            return
        self.in_loss_step = True
        try:
            with self._model.completing(self._complete):
                yield
        finally:
            self.in_loss_step = False

    def _complete(self, output: Any) -> Any:
        if output is None and (self._syncs or self.gathers.pending):
            self.lossless = True
            # The others' losses may depend on what this rank has given to a gather.
            self._sends_nothing = not self.gathers.pending
            return self.gathers.tie(self._model.lossless())
        if isinstance(output, Tensor):
            return self.gathers.tie(output)
        if self.gathers.pending and isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return {**output, "loss": self.gathers.tie(output["loss"])}
        return output

    def backward(self, backward: Callable[[], None]) -> bool:
        """Run the backward of a step, real or not; where no rank contributes to the gradients they are left cleared.

        Returns:
            `False` if it is known that no rank has a loss. Without a sync nobody knows.
        """
        if not (self.joined or self.lossless):
            self._listening_to(backward)
            self._model.accumulated = not self._syncs
            return True
        parameters, syncs = self._model.parameters, self._syncs
        if syncs:
            self._lossless.add(any(p.grad is not None for p in parameters))
        if self.joined or self._sends_nothing:
            self._model.backward(partial(self._listening_to, backward))
        else:
            with self._model.step(shadow=False):
                self._listening_to(backward)
        if not syncs:
            return True
        _compat.wait_for_device(parameters[0].device.type)
        census = self._lossless.read()
        for parameter in () if census.has_gradients else parameters:
            parameter.grad = None
        return census.has_loss

    def _listening_to(self, backward: Callable[[], None]) -> None:
        with self.server.backward() if self.in_tail and not self.joined else nullcontext():
            backward()
        self.check_reduced()

    def check_reduced(self) -> None:
        """Raise DDP's own error if the backward that has just ended left parameters out; all ranks call it."""
        if self._syncs:
            with self.server.own_collectives():
                _compat.check_reduced(self._model.ddp)

    @property
    def _syncs(self) -> bool:
        return bool(self._model.ddp.require_backward_grad_sync)

    def finish(self) -> None:
        """End the epoch: run the joinables' post-hooks."""
        self._lossless.tidy()
        for part in self._customs:
            part.after_all(self._attendance.ended_last(self.channel.rank))

    def sync_buffers(self) -> None:
        """Give all ranks the model's newest buffers; all ranks must call it."""
        if not self.keeps_buffers:
            self._model.sync_buffers(0)

    def use(self, model: ModelShadow) -> None:
        """Go on with another shadow: the model has been wrapped anew."""
        self._model = model

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that require a gradient and did not when the model was wrapped."""
        return self._model.unfrozen()
