"""Join for a loop that a framework drives: every rank runs every step, with a batch or without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook

from torch_join._attendance import Attendance
from torch_join._channel import Channel
from torch_join._errors import EarlyTerminationError, JoinTypeError
from torch_join._shadow import ModelShadow
from torch_join._weighting import Weighting, loss_factor
from torch_join.joinables._joinable import WrappingJoinable


class LockstepJoin:
    """One rank's part in training on uneven inputs, for a loop in which all ranks step together.

    A rank that has run out of batches stays in the loop. In each step it runs `shadow_forward()` in
    place of a forward and goes on as if it had had a batch: it takes part in the backward all-reduce
    with zero gradients, receives the average, and steps its own optimizer and schedulers. So all
    ranks are identical after every step.

    Args:
        channel: The channel between the ranks.
        model: The model's shadow.
        weighting: How much each active rank's gradient counts, see `resolve_weighting`.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out.
        joinables: `torch.distributed.algorithms.Joinable`s whose collectives the step issues besides
            the model's, after its forward; their main hooks run once per shadow step, in this order.
        **kwargs: Forwarded to every `join_hook`.

    Raises:
        JoinTypeError: One of `joinables` does not follow torch's protocol.

    """

    def __init__(
        self,
        channel: Channel,
        model: ModelShadow,
        *,
        weighting: Weighting = "world",
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
        self.channel = channel
        self.weighting = weighting
        self._model = model
        self._throw = throw_on_early_termination
        self._joinables = tuple(joinables)
        self._kwargs = kwargs
        self._hooks: list[JoinHook] = []
        self._attendance = Attendance(channel.world_size)
        self._samples = self._total_samples = 0

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
        self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
        self._attendance = Attendance(self.channel.world_size, first_step)
        everyone = self.channel.gather((end, samples, value))
        self._attendance.announce({rank: end for rank, (end, _, _) in enumerate(everyone) if end is not None})
        self._samples, self._total_samples = samples, sum(samples for _, samples, _ in everyone)
        self._check_termination()
        return [value for _, _, value in everyone]

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
        self._attendance.step += 1
        self._attendance.announce({r: n["end"] for r, n in beat.notices.items() if "end" in n})
        self._samples, self._total_samples = samples, beat.total
        self._check_termination()
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
        if self.in_tail and 0 not in self.active_ranks:
            self._model.sync_buffers(self.active_ranks[0])

    def shadow_forward(self) -> Tensor:
        """Run a joined rank's counterpart of a forward.

        Returns:
            A scalar zero, whose backward takes part in the gradients' all-reduce.

        """
        zero = self._model.forward()
        for hook in self._hooks:
            hook.main_hook()
        return zero

    def finish(self) -> None:
        """End the epoch: run the joinables' post-hooks."""
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=self._attendance.ended_last(self.channel.rank))
        self._hooks = []

    def sync_buffers(self) -> None:
        """Give all ranks the model's newest buffers; all ranks must call it."""
        self._model.sync_buffers(0)

    def _check_termination(self) -> None:
        if not (self._throw and self.in_tail):
            return
        # The texts of torch.distributed.algorithms.Join.
        if self.joined:
            raise EarlyTerminationError(f"Rank {self.channel.rank} exhausted all inputs.")
        raise EarlyTerminationError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
