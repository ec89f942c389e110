"""The progress of each rank in the dataloaders of an evaluation or a prediction."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_join import _compat
from lightning_join._compat import call_strategy_hook
from lightning_join._logging.step_values import counting_nothing
from lightning_join._reading import loaders as _loaders
from lightning_join._reading.fetcher import read_in_rounds
from lightning_join._strategy_protocol import strategy_of
from torch_join import UnsupportedError
from torch_join.integration import broadcast, make_placeholder, setting, without_rows


class Rounds:
    """The progress of a rank through the rounds; a round is one dataloader, or several that are read side by side.

    Ranks process their batches independently, and meet at each step only if some rank's number of batches is uncertain.
    A rank at the end of a round serves the collectives of the other ranks' steps, until they reach it too.

    Args:
        loop: The loop, an `InRounds`.

    Attributes:
        index: The number of the current round.
        places: The dataloaders that are read in each round.
        is_planned: Whether this rank's lengths are not known until its dataloaders are iterated.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, self._strategy = loop, strategy_of(loop.trainer)
        loader, all_loaders, most = loop._combined_loader, loop._all_loaders, loop.most_batches
        resumed = loop.batch_progress.current.ready > 0  # so that nothing is certain
        self._rank = self._strategy.channel.rank
        self.is_planned = any(all_loaders[self._rank].planned)
        self.index = 0
        self._steps = 0
        self._ended: frozenset[int] = frozenset()  # the ranks that have ended the round, if numbers are uncertain
        self._placeholder = self._strategy.options.placeholder
        self._last: Any = None  # the batch of this round from which placeholders are made
        self._limits_itself = loader._mode == "sequential"
        self.places: list[Sequence[int]] = [range(len(loader.flattened))]
        if self._limits_itself:
            self.places = [[place] for place in self.places[0]]
        # By round and by rank: the number of batches, and whether it is certain.
        self._limits: list[list[int | float]] = [
            [min(most, _loaders.total_length(loader, [each.limits[i] for i in places])) for each in all_loaders]
            for places in self.places
        ]
        self._certain = [
            [not resumed and all(each.certain[i] for i in places) for each in all_loaders] for places in self.places
        ]
        self._alike = [_loaders.steps_alike(all_loaders, places) for places in self.places]
        # The rounds in which some rank's number of batches may differ from the one that it announces before.
        planned = [any(each.planned[i] for each in all_loaders for i in places) for places in self.places]
        self._planned = {index for index, is_planned in enumerate(planned) if is_planned}

    @property
    def driver(self) -> Any:
        """The driver that serves the other ranks' steps; not an attribute, since the loop keeps this after the run."""
        return self._strategy.driver

    @property
    def over(self) -> bool:
        """Whether the limit is reached; Lightning checks that only if it knows all lengths."""
        if self._limits_itself or self.index in self._planned:
            return False
        return self._steps >= self._limits[self.index][self._rank]

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Wrap the processing of this rank's batch."""
        self._begin()
        active = self._active_ranks(has_batch=True)
        if self._placeholder is not None:
            self._keep(active, batch)
            around: AbstractContextManager[object] = setting(self._strategy, evaluated_by=active)
        else:
            around = self.driver.step(active)
        with around:
            self._strategy.gathers_alike = self._steps < self._alike[self.index]
            yield
            self._strategy.gathers_alike = False
        self._steps += 1

    def serve(self, active: tuple[int, ...]) -> None:
        """Take part, without a batch, in a step of these ranks: mirror it, or run it on a placeholder."""
        if self._placeholder is None:
            self.driver.follow(active)
            return
        self._keep(active, None)
        batch = make_placeholder(self._placeholder, self._last)
        with setting(self._strategy, evaluated_by=active), counting_nothing(self._strategy):
            self._loop.run_step(batch, self._steps)

    def _keep(self, active: tuple[int, ...], batch: Any) -> None:
        """Keep this rank's batch, or another rank's if this one has none in the round; all ranks call this."""
        if self._steps == 0:
            self._last = None
            if len(active) < self._strategy.world_size:
                own = without_rows(batch) if self._placeholder == "rows" and batch is not None else batch
                self._last = broadcast(own if self._rank == active[0] else None, active[0], self._strategy.root_device)
        self._last = self._last if batch is None else batch

    def finish(self, serve: Callable[[tuple[int, ...]], None]) -> None:
        """Proceed to the next round when all ranks have reached the end of this one.

        Args:
            serve: Called with the active ranks at each of their steps.

        Raises:
            UnsupportedError: This rank's dataloader has ended earlier than its length said.
        """
        self._begin()
        claimed = self._limits[self.index][self._rank]
        if self._certain[self.index][self._rank] and self._steps < claimed:
            raise UnsupportedError(
                f"Dataloader {self.index} of rank {self._rank} reported {claimed} batches but yielded {self._steps},"
                " and the other ranks rely on its length. Fix the length of its sampler."
            )
        while active := self._active_ranks(has_batch=False):
            serve(active)
            self._steps += 1
        self.driver.leave_tail()
        self.index, self._steps, self._ended = self.index + 1, 0, frozenset()

    def _begin(self) -> None:
        """Exchange the ranks' numbers of batches in this round, if the announced ones are uncertain; all ranks meet.

        This rank's dataloaders have then yielded their first batch or ended. Loaders that plan their batches anew know
        their number only from then on.
        """
        if self.index not in self._planned:
            return
        self._planned.discard(self.index)
        places, loop = self.places[self.index], self._loop
        loader, most = loop._combined_loader, loop.most_batches
        own = loop.measure([loader.flattened[i] for i in places])
        all_loaders = _loaders.exchange(self._strategy.channel, own)
        self._limits[self.index] = [min(most, _loaders.total_length(loader, each.limits)) for each in all_loaders]
        known = dict(zip(places, own.limits, strict=True))
        for place, limit in known.items():
            getattr(loop, loop._limits_name)[place] = limit
        before = enumerate(loader.limits or [])
        _compat.set_limits(loader, [min(most, known[i]) if i in known else limit for i, limit in before])

    def _active_ranks(self, has_batch: bool) -> tuple[int, ...]:
        """Return the ranks that have a batch at this step; all ranks meet if that is uncertain."""
        if all(self._certain[self.index]):
            return tuple(rank for rank, limit in enumerate(self._limits[self.index]) if limit > self._steps)
        has_ended = not has_batch and self._rank not in self._ended
        self._ended |= frozenset(self._strategy.channel.barrier(notice={} if has_ended else None).notices)
        return tuple(rank for rank in range(self._strategy.world_size) if rank not in self._ended)


class InRounds:
    """The common part of Lightning's evaluation and prediction loops, for different numbers of batches per rank."""

    _all_loaders: Sequence[_loaders.Loaders] = ()
    _rounds: Rounds
    _limits_name = "_max_batches"  # Lightning's name for the number of batches that are run of each dataloader

    @property
    def skip(self) -> bool:
        own = bool(super().skip)  # type: ignore[misc]
        return own and sum(min(self.most_batches, limit) for each in self._all_loaders for limit in each.limits) == 0

    @property
    def _step_name(self) -> str:
        """The name of the hook that gets a batch."""
        raise NotImplementedError

    @property
    def _limit(self: Any) -> int | float:
        limit: int | float = getattr(self.trainer, f"limit_{self._stage.dataloader_prefix}_batches")
        return limit

    @property
    def most_batches(self: Any) -> int | float:
        return self.trainer.num_sanity_val_steps if self.trainer.sanity_checking else float("inf")

    def setup_data(self: Any) -> None:
        before = getattr(self, self._limits_name)
        with _loaders.evened(self):
            super().setup_data()  # type: ignore[misc]
        if getattr(self, self._limits_name) is before:
            self._measure_again()
        else:
            self._take_lengths(
                _loaders.check_cycled(self._combined_loader, self.measure(self._combined_loader.flattened))
            )
            _loaders.warn(self._all_loaders)

    def _measure_again(self) -> None:
        """Measure dataloaders that are the same as in the previous run."""

    def measure(self: Any, loaders: Sequence[Any]) -> _loaders.Loaders:
        return _loaders.measure(self._stage, loaders, self._limit)

    def _take_lengths(self: Any, own: _loaders.Loaders) -> None:
        self._all_loaders = _loaders.exchange(strategy_of(self.trainer).channel, own)
        setattr(self, self._limits_name, list(own.limits))

    def reset(self: Any) -> None:
        own = self._all_loaders[self.trainer.global_rank]
        # Used until the dataloaders are iterated: a planned dataloader's reported length is not an upper bound.
        most = self._limit if isinstance(self._limit, int) else float("inf")
        before = [most if planned else n for n, planned in zip(own.limits, own.planned, strict=True)]
        with setting(self, **{self._limits_name: before}):
            super().reset()  # type: ignore[misc]
        self._rounds = Rounds(self)
        if not read_in_rounds(self._data_fetcher, self._rounds):
            self._rounds.places.clear()  # `predict_step(dataloader_iter)` reads its own batches: no rank can serve it

    def _finish_rounds(self, until: int | None = None) -> None:
        """Finish the rounds before `until`, or all of them; all ranks meet at the end of each."""
        while self._rounds.index < (len(self._rounds.places) if until is None else until):
            self._finish_round()

    def _finish_round(self) -> None:
        self._rounds.finish(self._rounds.serve)

    def run_step(self: Any, batch: Any, index: int) -> None:
        """Run the user's step, and no other hook, on a placeholder."""
        trainer, module = self.trainer, self.trainer.lightning_module
        place = self._rounds.index if len(self._rounds.places) > 1 else None
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=place or 0)
        batch = call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=place or 0)
        arguments = self._build_kwargs(batch, index, place)
        call_strategy_hook(
            trainer, self._step_name, *self._build_step_args_from_hook_kwargs(arguments, self._step_name)
        )
