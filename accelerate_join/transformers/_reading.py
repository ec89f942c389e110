"""Going through a loader on all ranks together: who has a batch in which step, several steps before it is run."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import SkipBatchSampler
from accelerate.utils import send_to_device

from accelerate_join import _compat_transformers as _compat
from accelerate_join._compat import without_none
from accelerate_join._loaders import certain_length
from accelerate_join.transformers._loader import EvenedLoader, without_rows
from torch_join import JoinError, UnsupportedError
from torch_join.integration import Channel, Count, Reader, ReadStep, Rebalancer, Rebalancing, early_termination

_END = object()
_Mine = tuple[bool, int | None, bool]
_Steps = Generator[tuple[Any, ReadStep], None, None]


class Reading:
    """One loop after another over loaders of one kind.

    Args:
        channel: The ranks' channel.
        device: Where batches go.
        begin: Begins a loop with what this rank has to say, and returns what all ranks say; all ranks meet.
        finish: Ends a loop; all ranks call it.
        count: Returns what a batch counts, where batches are counted.
        rebalancing: Has ranks give batches to each other, if it is enabled.
        throws: Whether to raise on all ranks when the first one runs out of batches.
    """

    def __init__(
        self,
        channel: Channel,
        device: torch.device,
        begin: Callable[[_Mine], list[_Mine]],
        finish: Callable[[], None],
        count: Count | None = None,
        rebalancing: Rebalancing | None = None,
        throws: bool = False,
    ) -> None:
        self._channel, self._device = channel, device
        self._begin_loop, self._finish_loop = begin, finish
        self._count, self._rebalancing, self._throws = count, rebalancing, throws
        self._ahead: deque[tuple[Any, ReadStep]] = deque()  # what was read, and who has a batch in its step
        self._current: Generator[Any, None, None] | None = None

    def go_through(self, loader: EvenedLoader) -> Iterator[Any]:
        """Return this rank's batches, and for as long as other ranks have some a batch without rows."""
        self.leave()
        self._current = current = self._go_through(loader)
        return current

    def leave(self) -> None:
        """Leave the current loop, if Trainer has left it before its end; all ranks call it."""
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def take(self, inputs: Any) -> ReadStep | None:
        """Return who has a batch in the step of these inputs; `None` if they are none that were read."""
        while self._ahead:
            given, step = self._ahead.popleft()
            if given is inputs:
                return step
        return None

    def _go_through(self, loader: EvenedLoader) -> Generator[Any, None, None]:
        last: Any = _END
        self._ahead.clear()
        loader.end_of_dataloader = False
        rebalances = self._rebalancing is not None and self._rebalancing.enabled
        steps = self._planned(loader, self._rebalancing) if rebalances and self._rebalancing else self._own(loader)
        lengths = _Lengths(loader)
        first = [*islice(steps, 1)]  # with which Accelerate's own loader has begun: ours comes after it
        with closing(steps), _compat.active_loader(loader):
            for batch, step in chain(first, steps):
                loader.end_of_dataloader = step.is_last_step
                if batch is not _END:
                    last = batch
                elif last is not _END:
                    loader.template, last = without_rows(last), _END
                given = loader.template if batch is _END else batch
                self._ahead.append((given, step))
                lengths.note(step)
                yield given
        if last is not _END:
            loader.template = without_rows(last)
        lengths.end()
        self._finish_loop()

    def _own(self, loader: EvenedLoader) -> _Steps:
        """Yield this rank's batches, and the end in steps without one."""
        rank = self._channel.rank
        iterator = without_none(type(loader.loader).__iter__)(loader.loader)
        batch = next(iterator, _END)
        everyone = self._begin(loader, batch, certain_length(loader.loader))
        active = tuple(rank for rank, (has, *_) in enumerate(everyone) if has)
        lengths = [length for _, length, _ in everyone]
        step = 0
        while active:
            if self._throws and len(active) < self._channel.world_size:
                raise early_termination(rank, rank not in active)
            has_next = batch is not _END and not loader.loader.end_of_dataloader
            counted = total = 0.0
            if self._count is not None or None in lengths:
                counted = float(self._count(batch)) if self._count is not None and batch is not _END else 0.0
                said = self._channel.gather((has_next, counted), of=tuple[bool, float])
                going_on = tuple(rank for rank, (has, _) in enumerate(said) if has)
                total = math.fsum(number for _, number in said)
            else:
                going_on = tuple(rank for rank, length in enumerate(lengths) if step + 1 < (length or 0))
                if has_next != (rank in going_on):
                    raise JoinError(
                        f"The dataloader of rank {rank} has said that it has {lengths[rank]} batches, and has"
                        f" {'more' if has_next else 'fewer'}."
                    )
            yield self._to_device(batch), ReadStep(active, not going_on, counted, total)
            active, step = going_on, step + 1
            batch = next(iterator, _END) if batch is not _END else _END

    def _planned(self, loader: EvenedLoader, rebalancing: Rebalancing) -> _Steps:
        """Yield what this rank trains on where batches are rebalanced: its own, and others'."""
        if type(loader.loader.batch_sampler) is SkipBatchSampler or loader.loader.skip_batches:
            raise UnsupportedError(
                "rebalance=True: a checkpoint does not say which batches were given away, so that training cannot go on"
                " in the middle of an epoch. Resume at the begin of one, or use ignore_data_skip=True."
            )
        reader = Reader(loader.loader.base_dataloader)
        plans: list[Rebalancer] = []
        certain = certain_length(loader.loader)

        def begin(source: Reader[Any]) -> None:
            length = loader.said.length if certain is None else certain
            options: dict[str, Any] = {"count": self._count, "is_certain": certain is not None}
            plan = rebalancing.begin(self._channel, source, length, self._meet, **options)
            plans.extend([] if plan is None else [plan])

        self._begin(loader, reader.peek() if reader.has_next() else _END, certain)
        reader.rebalanced(begin)
        if not plans:
            yield from self._even(reader)
            return
        (plan,) = plans
        try:
            while plan.active_ranks:
                step = ReadStep(plan.active_ranks, plan.is_last_step, plan.count(), plan.total)
                yield _END if plan.share is None else self._to_device(plan.take()), step
                plan.advance(self._meet)
        except GeneratorExit:
            pass  # all ranks leave at this step
        plan.end()

    def _even(self, reader: Reader[Any]) -> _Steps:
        """Yield this rank's batches where all ranks have equally many."""
        everyone = tuple(range(self._channel.world_size))
        while reader.has_next():
            batch = reader.take()
            counted = total = 0.0
            if self._count is not None:
                counted = float(self._count(batch))
                total = math.fsum(self._channel.gather(counted, of=float))
            yield self._to_device(batch), ReadStep(everyone, not reader.has_next(), counted, total)

    def _meet(self, count: float, notice: dict[str, Any]) -> Any:
        return self._channel.barrier(count, notice or None)

    def _to_device(self, batch: Any) -> Any:
        return batch if batch is _END else send_to_device(batch, self._device)

    def steps_of(self, batches: Sequence[Any]) -> list[ReadStep]:
        """Return the steps of some of the batches that were read."""
        return [step for given, step in self._ahead if any(given is batch for batch in batches)]

    def _begin(self, loader: EvenedLoader, batch: Any, length: int | None) -> list[_Mine]:
        """Begin to go through a loader; all ranks meet.

        Returns:
            By rank: whether it has a batch; how many, if there can be no other number; whether it has had none so far.
        """
        everyone = self._begin_loop((batch is not _END, length, loader.template is None and batch is _END))
        lacking = [rank for rank, (*_, lacks) in enumerate(everyone) if lacks]
        source = next((rank for rank, (has, *_) in enumerate(everyone) if has), None)
        if lacking and source is not None:
            # The kind of a batch is all that they need.
            mine = send_to_device(without_rows(batch), "cpu") if self._channel.rank == source else None
            shared = broadcast(mine, source, self._device)
            if self._channel.rank in lacking:
                loader.template = self._to_device(shared)
        return everyone


class _Lengths:
    """Warns where the loaders' lengths, by which Trainer plans an epoch, prove wrong.

    Args:
        loader: What is gone through. The rest of one, where an epoch is resumed, is not compared.
    """

    def __init__(self, loader: EvenedLoader) -> None:
        known = [said.length for said in loader.everyone if loader.trains]
        self._lengths = [] if None in known else [length or 0 for length in known]
        self._planned = len(loader) if self._lengths else 0
        self._rebalances = loader.rebalances
        self._yielded = [0] * len(self._lengths)
        self._steps = 0

    def note(self, step: ReadStep) -> None:
        """Note a step that was read."""
        self._steps += 1
        for rank in step.active_ranks if self._lengths else ():
            self._yielded[rank] += 1
        if self._steps == self._planned and not step.is_last_step:
            warnings.warn(
                f"The train dataloaders have batches left after {self._planned} steps, which is as many as their"
                f" lengths say (by rank: {self._lengths}). Trainer reads no further, in one process too. Return a"
                " length that is not too small, or none, and set max_steps.",
                stacklevel=2,
            )

    def end(self) -> None:
        """Compare what the ranks have yielded with what they have said, at the end of all batches."""
        if self._rebalances and self._steps == self._planned:
            return  # a rank trains on others' batches
        for rank, (length, yielded) in enumerate(zip(self._lengths, self._yielded, strict=True)):
            if yielded < length:
                warnings.warn(
                    f"The train dataloader of rank {rank} said it had {length} batches and yielded {yielded}. The rank"
                    " joins after those. Trainer has planned the learning rate and the number of steps by that length.",
                    stacklevel=2,
                )


def broadcast(value: Any, source: int, device: torch.device) -> Any:
    """Return what rank `source` has, on all ranks; it is pickled."""
    values = [value]
    dist.broadcast_object_list(values, source, device=device)
    return values[0]
