"""A loop that a framework drives, in which finished ranks run the step themselves, on placeholders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable

from torch_join._base.attributes import setting
from torch_join._lockstep.base import Lockstep
from torch_join._lockstep.step_driver import StepDriver
from torch_join._participants.kinds import refuse_engines
from torch_join._participants.participant import Participant
from torch_join._schedule.active_ranks import ReadStep
from torch_join._schedule.placeholders import WeighedLosses, make_placeholder


class PlaceholderLockstep(Lockstep):
    """A model for which every rank makes every call, with a batch or with a placeholder whose loss counts zero.

    Args:
        driver: See `Lockstep`.
        model: The model, in its wrapper.
        joinables: See `Lockstep`.

    Attributes:
        in_step: Whether this rank is in a step's forward.
        scale: A further factor of an active rank's loss, for a framework that weights losses itself.

    Raises:
        UnsupportedError: The model is a DeepSpeed engine.
    """

    runs_placeholders = True
    in_step = False
    scale = 1.0

    def __init__(self, driver: StepDriver, model: nn.Module, joinables: Sequence[Joinable] = ()) -> None:
        refuse_engines([model])
        super().__init__(driver, Participant, joinables, [])
        self._module = model
        self._losses: WeighedLosses | None = None
        self._number, self._batch = 0, None

    def use(self, model: nn.Module) -> None:
        """Use another wrapper."""
        self._module, self._losses = model, None

    def _begin_losses(self) -> WeighedLosses:
        if self._losses is None:
            world_size = self.channel.world_size
            self._losses = WeighedLosses(self.weighting, world_size, [self._module], [], self._number)
            self._losses.step = self._read_step
        return self._losses

    def _read_step(self) -> ReadStep:
        counted, total = self._counts
        return ReadStep(self.active_ranks, False, counted, total)

    def begin(self, *args: Any, **kwargs: Any) -> list[Any]:
        self._losses = None
        return super().begin(*args, **kwargs)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """See `Lockstep`.

        Raises:
            UnsupportedError: A placeholder with rows would count in the statistics of all ranks.
        """
        losses = self._begin_losses()
        if self.in_tail:
            self._note_step()
        with losses.entered():
            losses.begin(self._number, self.joined, self._batch)
            losses.scale = self.scale
            self._batch = None
            yield
        losses.before = self.active_ranks
        if 0 not in self.active_ranks:
            self.sync_buffers()  # rank 0 writes checkpoints

    def begin_step(self, batch: Any) -> Any:
        """Move to a step; return the batch that this rank runs in it: `batch`, or a placeholder made from it."""
        self._number += 1
        if self.joined:
            kind = self.driver.options.placeholder
            assert kind is not None
            batch = make_placeholder(kind, batch)
        self._batch = batch
        return batch

    def active_step(self) -> AbstractContextManager[None]:
        self._exchanged.poll()
        return setting(self, in_step=True)

    @property
    def loss_factor(self) -> float:
        return 1.0  # the loss is weighted where its backward starts

    def backward(self, backward: Callable[[], None]) -> bool:
        backward()
        return True

    def in_engine(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        self.sync_buffers()
        super().finish()

    def sync_buffers(self) -> None:
        if self._losses is not None and not self.keeps_buffers:
            self._losses.give_buffers()
