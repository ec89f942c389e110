"""For a framework that iterates a loader itself: each rank has as many steps as the longest rank has batches.

The framework plans by the loader's length, and may read several steps ahead. When it runs a step that it has read,
`take` returns which ranks have a batch in it:

    loader = EvenedLoader(own_loader, empty)
    evened = Evened(driver, device, begin, join.finish)  # `begin` calls `join.begin`
    for batch in evened.go_through(loader):
        join.go_to(evened.take(batch))
        ...  # a step of `join`: see `Lockstep`

`tests/core/_lockstep/test_evened.py` has such a framework in a few lines; Trainer is one.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_join._base.errors import JoinDataWarning, JoinError, JoinTypeError
from torch_join._base.weighting import Count
from torch_join._lockstep.step_driver import StepDriver
from torch_join._schedule.active_ranks import ReadStep, early_termination
from torch_join._schedule.plan import steps_of
from torch_join._schedule.rebalancing import Rebalancer
from torch_join._tail.reader import Reader
from torch_join._tail.schedules import PlannedReader

_END = object()
_Steps = Generator[tuple[Any, ReadStep], None, None]
# A rank's message when it starts a loader: whether it has a batch; its certain number of batches, if any; and whether
# it has never had a batch so far.
Beginning = tuple[bool, int | None, bool]


class EvenedLoader:
    """This rank's loader, with the lengths of the other ranks' loaders.

    Its length is this rank's own until the ranks have exchanged theirs: asking for it never communicates. A framework
    that reads its loader in its own way makes a subclass.

    Args:
        loader: This rank's own loader.
        empty: Returns an empty batch of the same kind as a given one, for steps after this rank has finished.
        trains: Whether its batches are trained on.
        rebalances: Whether ranks send batches to each other.
        keeps: Whether a finished rank needs a whole batch: its own last batch, or another rank's.

    Attributes:
        kept: That batch; `None` before this rank has one.
        lengths: By rank, the length of its loader (`None` if it has none); empty until the ranks have exchanged these.
        stand_in: The batch for steps after this rank has finished; `None` until it has had, or received, a batch.
        is_last_step: Whether no rank has a batch after the last step yielded.
    """

    framework = "The framework"  # for messages

    def __init__(
        self,
        loader: Any,
        empty: Callable[[Any], Any],
        trains: bool = True,
        rebalances: bool = False,
        keeps: bool = False,
    ) -> None:
        self.loader, self.empty, self.trains, self.rebalances, self.keeps = loader, empty, trains, rebalances, keeps
        self.kept: Any = None
        self.lengths: Sequence[int | None] = ()
        self.stand_in: Any = None
        self.is_last_step = False

    @property
    def length(self) -> int | None:
        """The length of this rank's loader, if any."""
        return length_of(self.loader)

    def __len__(self) -> int:
        lengths = [*self.lengths] or [self.length]
        if None in lengths:
            raise JoinTypeError("At least one rank's dataloader has no length.")
        known = [length or 0 for length in lengths]
        return steps_of(known) if self.rebalances else max(known)

    def keep(self, batch: Any) -> None:
        """Keep this batch, if `keeps`, and its stand-in, for the steps after this rank has finished."""
        self.kept, self.stand_in = batch if self.keeps else None, self.empty(batch)

    def reader(self, counts: bool) -> Reader[Any]:
        """Return a reader of this rank's batches; `counts` is whether each is counted."""
        return Reader(self.loader)

    def around(self) -> AbstractContextManager[object]:
        """Wrap all steps, from the moment when the first one is read."""
        return nullcontext()

    def moved(self, batch: Any, device: torch.device | str) -> Any:
        """Return a batch on a device."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


class Evened:
    """Iterates over one loader after another, on all ranks together.

    Args:
        driver: The driver of the steps.
        device: The device of the batches.
        begin: Starts a loop: sends this rank's `Beginning`, and returns those of all ranks; all ranks meet.
        finish: Ends a loop; all ranks call it.

    Attributes:
        loader: The loader of the current loop, or of the last one.
    """

    def __init__(
        self,
        driver: StepDriver,
        device: torch.device,
        begin: Callable[[Beginning], Sequence[Beginning]],
        finish: Callable[[], None],
    ) -> None:
        self._driver, self._channel, self._device = driver, driver.tail_log.channel, device
        self._begin_loop, self._finish_loop = begin, finish
        self._count: Count | None = None  # returns the count of a batch, if batches are counted
        self.loader: EvenedLoader | None = None
        self._ahead: deque[tuple[Any, ReadStep]] = deque()  # batches read, and the ranks with one in the same step
        self._current: Generator[Any, None, None] | None = None

    def go_through(self, loader: EvenedLoader) -> Iterator[Any]:
        """Yield this rank's batches, and then stand-ins for as long as other ranks have batches.

        Raises:
            EarlyTerminationError: On all ranks, if they are to throw and some rank runs out of batches before others.
            JoinError: The loader's number of batches is not its certain length.
        """
        self.leave()
        self._current = current = self._go_through(loader)
        return current

    def leave(self) -> None:
        """Leave the current loop, if the framework has left it before its end; all ranks call it."""
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def take(self, batch: Any) -> ReadStep | None:
        """Return which ranks have a batch in a yielded batch's step; `None` if it was not yielded. Call it in order."""
        while self._ahead:
            given, step = self._ahead.popleft()
            if given is batch:
                return step
        return None

    def steps_of(self, batches: Sequence[Any]) -> list[ReadStep]:
        """Return the steps of some of the batches that were read but not taken."""
        return [step for given, step in self._ahead if any(given is batch for batch in batches)]

    def _go_through(self, loader: EvenedLoader) -> Generator[Any, None, None]:
        self._ahead.clear()
        self.loader, self._count = loader, self._driver.members.count if loader.trains else None
        loader.is_last_step = False
        last, steps = _END, _checked(loader, self._steps(loader))
        with ExitStack() as stack:
            stack.callback(steps.close)
            for number, (batch, step) in enumerate(steps):
                if not number:  # after anything that the loader itself does at its start
                    stack.enter_context(loader.around())
                loader.is_last_step = step.is_last_step
                if batch is not _END:
                    last = batch
                elif last is not _END:
                    loader.keep(last)
                    last = _END
                given = loader.stand_in if batch is _END else batch
                self._ahead.append((given, step))
                yield given
        if last is not _END:
            loader.keep(last)
        self._finish_loop()

    def _steps(self, loader: EvenedLoader) -> _Steps:
        """Yield this rank's batches, and `_END` in steps without one."""
        rebalancing, reader = self._driver.rebalancing, loader.reader(self._count is not None)
        certain, plan = reader.certain_length(), None
        throws = loader.trains and self._driver.options.throw_on_early_termination
        if loader.rebalances and rebalancing.enabled:
            rebalancing.current = None  # that of the last loop, since not every reader starts a plan
            reader = reader.rebalanced(partial(self._plan, loader.length))
            plan = rebalancing.current
        batch, counted = self._take(reader, plan)
        beginnings = self._begin(loader, batch, certain)
        if plan is not None:
            yield from self._planned(reader, plan, batch)
            return
        rank, step = self._channel.rank, 0
        active = tuple(rank for rank, (has_batch, *_) in enumerate(beginnings) if has_batch)
        lengths = [length for _, length, _ in beginnings]
        while active:
            if throws and len(active) < self._channel.world_size:
                raise early_termination(rank, rank not in active)
            continues, total = batch is not _END and reader.goes_on, 0.0
            if self._count is not None or None in lengths:
                answers = self._channel.gather((continues, counted), of=tuple[bool, float])
                next_active = tuple(rank for rank, (continues, _) in enumerate(answers) if continues)
                total = math.fsum(number for _, number in answers)
            else:
                next_active = tuple(rank for rank, length in enumerate(lengths) if step + 1 < (length or 0))
                if continues != (rank in next_active):
                    raise JoinError(
                        f"The dataloader of rank {rank} reported {lengths[rank]} batches but yielded"
                        f" {'more' if continues else 'fewer'}. Fix its length."
                    )
            yield batch, ReadStep(active, not next_active, counted, total, reader.trained_on)
            active, step = next_active, step + 1
            batch, counted = self._take(reader) if batch is not _END else (_END, 0.0)

    def _take(self, reader: Reader[Any], plan: Rebalancer | None = None) -> tuple[Any, float]:
        """Return this rank's next batch, if any, and its count, which is 0 if the plan counts it."""
        if not reader.has_next():
            return _END, 0.0
        counted = 0.0 if self._count is None or plan is not None else float(reader.count(self._count))
        return reader.take(), counted

    def _planned(self, reader: Reader[Any], plan: Rebalancer, batch: Any) -> _Steps:
        """Yield the batches that this rank trains on if they are rebalanced: its own, and others'."""
        try:
            while plan.active_ranks:
                yield (
                    batch,
                    ReadStep(plan.active_ranks, plan.is_last_step, plan.count(), plan.total, reader.trained_on),
                )
                plan.advance()
                batch, _ = self._take(reader, plan)
        except GeneratorExit:
            pass  # all ranks leave at this step
        plan.end()

    def _plan(self, length: int | None, source: Reader[Any]) -> Reader[Any] | None:
        certain = source.certain_length()
        length, is_certain = length if certain is None else certain, certain is not None
        plan = self._driver.rebalancing.begin(self._channel, source, length, is_certain=is_certain)
        return None if plan is None else PlannedReader(plan, source)

    def _begin(self, loader: EvenedLoader, batch: Any, certain: int | None) -> Sequence[Beginning]:
        """Start a loader, with this rank's first batch; all ranks meet. Return all ranks' `Beginning`s."""
        has_batch = batch is not _END
        beginnings = self._begin_loop((has_batch, certain, loader.stand_in is None and not has_batch))
        lacking = [rank for rank, (*_, lacks) in enumerate(beginnings) if lacks]
        source = next((rank for rank, (has_batch, *_) in enumerate(beginnings) if has_batch), None)
        if lacking and source is not None:
            # These ranks need only an empty batch of the same kind, except for placeholders.
            template = None
            if self._channel.rank == source:
                template = loader.moved(batch if loader.keeps else loader.empty(batch), "cpu")
            shared = broadcast(template, source, self._device)
            if self._channel.rank in lacking:
                loader.keep(loader.moved(shared, self._device))
        return beginnings


def _checked(loader: EvenedLoader, steps: _Steps) -> _Steps:
    """Yield the steps, and warn if the loaders' lengths, by which a framework plans an epoch, prove wrong.

    The rest of a loader, in a resumed epoch, is not compared.
    """
    known = [*loader.lengths] if loader.trains else []
    lengths = [] if None in known else [length or 0 for length in known]
    planned, yielded, number = len(loader) if lengths else 0, Counter[int](), 0
    with closing(steps):
        for number, (batch, step) in enumerate(steps, 1):
            yielded.update(step.active_ranks)
            if number == planned and not step.is_last_step:
                JoinDataWarning.warn(
                    f"The train dataloaders have batches left after {planned} steps, the number that their lengths"
                    f" imply (by rank: {lengths}). Like in a single process, {loader.framework} drops the rest. Return"
                    " a length that is not too small, or none, and set the number of steps."
                )
            yield batch, step
    if loader.rebalances and number == planned:
        return  # a rank trains on others' batches
    for rank, length in enumerate(lengths):
        if yielded[rank] < length:
            JoinDataWarning.warn(
                f"The train dataloader of rank {rank} reported {length} batches but yielded only {yielded[rank]}, and"
                f" then the rank finished. {loader.framework} bases the learning rate schedule and the number of steps"
                " on that length. Return the true length, or none."
            )


def length_of(sized: Any) -> int | None:
    """Return the length of an object, or `None` if it has none."""
    try:
        return len(sized)
    except TypeError:
        return None


def broadcast(value: Any, source: int, device: torch.device) -> Any:
    """Return, on all ranks, the value on rank `source`, which is pickled."""
    values = [value]
    dist.broadcast_object_list(values, source, device=device)
    return values[0]
