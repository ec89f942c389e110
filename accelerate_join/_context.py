"""The three entry points of the context: a `torch_join.Join` around the objects that an accelerator has prepared."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast, overload
from weakref import WeakKeyDictionary

import accelerate
import torch
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from accelerate_join import _compat, _positions
from accelerate_join._accelerator import InContext, class_replaced, gather_in_order
from accelerate_join._loaders import (
    PreparedReader,
    deals_out,
    even_batches_set,
    goes_through_join,
    is_prepared,
    loops_replaced,
    prepare_own,
    refuse_own_shards,
)
from accelerate_join._operations import Operations
from accelerate_join._prepared import PreparedLoader, Progress, check_supported, prepared_by, unwrap
from torch_join import Join, JoinDataWarning, JoinTypeError, JoinValueError, UnsupportedError
from torch_join.integration import (
    JoinOptions,
    StopSignals,
    driver_of,
    listed,
    own_loops,
    renamed,
    setting,
    showing_options,
)

T = TypeVar("T")


@showing_options
@renamed
def join_uneven_inputs(
    accelerator: accelerate.Accelerator,
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    **options: Unpack[JoinOptions],
) -> AbstractContextManager[Join]:
    """Train on uneven inputs with Accelerate, exactly.

    ```python
    with join_uneven_inputs(accelerator):
        for batch in loader:
            ...
    ```

    All objects that `accelerator` has prepared take part. A process that runs out of batches stays at the end of its
    loader and follows the others. All processes leave the loop together, with the state of the last active process.

    Args:
        accelerator: The accelerator that prepared the models, optimizers, schedulers and loaders.
        joinables: Additional objects that take part: torch `Joinable`s and objects with `state_dict` and
            `load_state_dict`. Prepared models and optimizers may be listed too.
        even_batches: Overrides `even_batches` of prepared loaders in the context; `None` leaves it unchanged.
        **options: The keyword arguments of `torch_join.Join`: `weighting`, `throw_on_early_termination`, `may_break`,
            `timeout`, `audit`, `hand_over_ignored`, `hand_over_buffers`, `backward_collectives`, `rebalance`,
            `placeholder`, `monitor` (a `torch_join.JoinMonitor`, whose values also go to the trackers), and options for
            hooks.

    Returns:
        The context, which yields a `torch_join.Join`. Its `batches` takes loaders that Accelerate has not prepared.

    Raises:
        UnsupportedError: Accelerate does not use DistributedDataParallel, FSDP or DeepSpeed; or it accumulates
            gradients while `weighting` is a function.
        JoinError: A prepared model has several wrappers, so it is unclear which one the loop calls.
        JoinTypeError: An argument is unknown, and no hook takes it.
    """
    return _context(accelerator, joinables, even_batches, **options)


@contextmanager
def _context(
    accelerator: accelerate.Accelerator,
    joinables: Sequence[Any] | None,
    even_batches: bool | None,
    is_one_loop: bool = False,
    **options: Any,
) -> Iterator[Join]:
    """Implement `join_uneven_inputs`; `is_one_loop` means that it contains one loop, which goes through `Join`."""
    own_loops.finish(accelerator, also_held=True)
    distributed = check_supported(accelerator)
    given = [] if joinables is None else listed(joinables)
    if callable(options.get("weighting")) and accelerator.gradient_accumulation_steps > 1:
        raise UnsupportedError(
            "A weighting function cannot be used with gradient_accumulation_steps > 1: it would weight each batch by"
            " its own count, not by the window's count. Set gradient_accumulation_steps=1 and use `for window in"
            " join.batches(torch_join.windows(loader, steps))`, with accelerator.no_sync(model) except for the last"
            " batch."
        )
    join = _Join(accelerator, given, distributed, **options)
    driver = driver_of(join)
    with ExitStack() as stack:
        if distributed:
            stack.enter_context(even_batches_set(accelerator, even_batches))
        with own_loops.begin(accelerator, driver if is_one_loop else None):
            stack.enter_context(join)
        if distributed or driver.options.monitor is not None:
            stack.enter_context(loops_replaced(join._iterate, join._note_epoch))
        if distributed:
            stack.enter_context(join._operations.replacing())
            stack.enter_context(class_replaced(accelerator, join._operations))
        yield join
    join._warn_of_mixed_epochs()
    if distributed:
        own_loops.may_end(accelerator, driver)


@overload
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: DataLoader[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    own_shards: bool = False,
    **options: Unpack[JoinOptions],
) -> Iterable[T]: ...
@overload
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: Iterable[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    own_shards: bool = False,
    **options: Unpack[JoinOptions],
) -> Iterable[T]: ...
@showing_options
@renamed
def join_batches(
    accelerator: accelerate.Accelerator,
    loader: Iterable[T],
    joinables: Sequence[Any] | None = None,
    even_batches: bool | None = False,
    own_shards: bool = False,
    **options: Any,
) -> Iterable[T]:
    """Iterate over `loader` inside its own `join_uneven_inputs` context.

    ```python
    for epoch in range(epochs):
        for batch in join_batches(accelerator, loader):  # was: in loader
            ...
    ```

    The context ends with the loop. After a `break`, it ends at the next operation that communicates with other
    processes or that saves, reads or prepares a model, and at the latest at `end_training` or process exit.

    Args:
        accelerator: The accelerator that prepared the models, optimizers, schedulers and loaders.
        loader: A prepared loader, or any other iterable.
        joinables: As in `join_uneven_inputs`.
        even_batches: As in `join_uneven_inputs`.
        own_shards: Whether the loader reads only this process's data. Raises if the loader was prepared without
            `own_shards=True`, because Accelerate has then split it among the processes.
        **options: The other arguments of `join_uneven_inputs`.

    Returns:
        An iterable over this process's batches, for one loop.

    Raises:
        JoinValueError: See `own_shards`.

    Limits:
        An exception that you catch outside the loop looks like a `break` to the other processes. To raise it on them
        too, use `with join_uneven_inputs(...)`. An exception that ends the process always reaches them.
    """
    if own_shards and is_prepared(loader) and deals_out(cast(Any, loader)):
        raise JoinValueError(
            "join_batches(loader, own_shards=True) got a loader that accelerator.prepare has already split among the"
            " processes. Pass own_shards=True to prepare too, or do not prepare the loader."
        )
    return own_loops.Loop(
        accelerator,
        loader,
        partial(_context, accelerator, joinables, even_batches, goes_through_join(loader), **options),
        lambda join, loader: join.batches(loader),
        check_supported(accelerator),  # a single process has nobody to wait for
        "accelerator.end_training()",
    )


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's `Accelerator` with an exact `join_uneven_inputs`, and with `join_batches` and `gather_in_order`."""

    # These functions take `self` as their accelerator.
    join_uneven_inputs = join_uneven_inputs
    join_batches = join_batches
    gather_in_order = gather_in_order
    _own_shards = False

    def stop_requested(self) -> bool:
        """Return whether a process has received SIGTERM or SIGUSR1; all processes get `True` in the same step.

        ```python
        for epoch in range(epochs):
            for batch in accelerator.join_batches(loader):
                ...
                if accelerator.stop_requested():
                    accelerator.save_state(path)
                    break
            if accelerator.stop_requested():  # in all processes, also those that had run out of batches
                break
        ```

        In a loop, call it on all active processes at the same step. After the loop, it returns the loop's result again:
        see `torch_join.Join.stop_requested`. Save in the loop's body, because after a `break` Accelerate saves the
        start of the epoch as the position. From the first call until `end_training`, these signals no longer end the
        processes.
        """
        signals = stop_signals(self)
        signals.listen()
        if not (signals.agreed or signals.in_loops):
            received = torch.tensor(float(signals.received), device=self.device)
            signals.agreed = bool(self.reduce(received) > 0)
        return signals.agreed

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Call Accelerate's method, and save each process's position in its loaders."""
        with _positions.saving_places(self):
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Call Accelerate's method, and restore each process's position in its loaders.

        Raises:
            JoinError: The checkpoint lacks the position of some process.
            UnsupportedError: Another number of processes wrote the checkpoint in the middle of an epoch.
        """
        with _positions.loading_places(self, kwargs.get("load_kwargs")):
            super().load_state(*args, **kwargs)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Call Accelerate's method.

        Raises:
            JoinError: It is called outside the context in a loop over each process's own data.
        """
        if not isinstance(self, InContext):
            refuse_own_shards(self)
        return super().gather_for_metrics(*args, **kwargs)

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call Accelerate's method, and clear the cached search for model wrappers."""
        _compat.forget_search(self)
        return super().prepare_model(*args, **kwargs)

    def prepare(self, *objects: Any, own_shards: bool = False, **kwargs: Any) -> Any:
        """Call Accelerate's method.

        Args:
            *objects: Models, optimizers, schedulers and loaders.
            own_shards: Whether these loaders read each process's own data, so that Accelerate does not shard them.
            **kwargs: Accelerate's own arguments.
        """
        with setting(self, _own_shards=own_shards):
            return super().prepare(*objects, **kwargs)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Call Accelerate's method, and make a stateful loader resume correctly more than once."""
        if self._own_shards and not _compat.has_prepared(data_loader):
            data_loader = prepare_own(self, data_loader, device_placement)
            _compat.take_as_prepared(data_loader)
        loader = super().prepare_data_loader(data_loader, device_placement, *args, **kwargs)
        _positions.count_once(loader)
        return loader

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Call Accelerate's method; each process also saves its own position in a registered `DataLoaderShard`.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`, and loaders over each process's own shard.
        """
        super().register_for_checkpointing(*(each for each in objects if not is_prepared(each)))
        for loader in filter(is_prepared, objects):
            _compat.take_as_prepared(loader)
            self.prepare_data_loader(loader)

    def end_training(self) -> None:
        """Finish a `join_batches` loop that was left, and call Accelerate's method.

        Raises:
            JoinError: A finished process missed the end of training and started another loop.
        """
        own_loops.finish(self, at_end=True)
        own_loops.end(self)
        stop_signals(self).restore()
        super().end_training()


# One object per accelerator, because a signal applies to all of its loops.
_signals: WeakKeyDictionary[accelerate.Accelerator, StopSignals] = WeakKeyDictionary()


def stop_signals(accelerator: accelerate.Accelerator) -> StopSignals:
    """Return the stop signals of an accelerator's processes."""
    return _signals.setdefault(accelerator, StopSignals(lasts=True))


class _Join(Join):
    """The `Join` around the objects that `accelerator` has prepared and the user's further joinables.

    Users get it; it adds no public names to those of `Join`.
    """

    _operations: Operations  # Accelerate's operations, adapted to joined ranks

    def __init__(self, accelerator: accelerate.Accelerator, given: Sequence[Any], enable: bool, **options: Any) -> None:
        self._accelerator = accelerator
        self._began: dict[int, int] = {}  # the step at which each loader's loop started
        self._mixes = False
        given = [unwrap(thing) for thing in given]
        if any(map(is_prepared, [*given, *_compat.registered(accelerator)])):
            raise JoinTypeError(
                "The list of joinables contains a loader, but takes only objects that are the same on all processes,"
                " such as models and optimizers. Remove the loader and iterate over it in the context: `for batch in"
                " loader`. To save its position on each process, register it with accelerate_join.Accelerator."
            )
        prepared = prepared_by(accelerator, given) if enable else []
        progress = Progress(accelerator, lambda: getattr(self._driver.reader, "prepared", None))
        things = list({id(thing): thing for thing in [*given, *prepared, progress]}.values())
        super().__init__(things, enable, **options)
        self._driver = driver_of(self)
        self._driver.tail.changes_freely = progress
        self._driver.signals = stop_signals(accelerator)
        own = type(accelerator)
        # Without a step: if it was after the user's last one, W&B would drop values that the user logs later.
        self._driver.log_epoch = lambda values, _: own.log(accelerator, values)
        if enable:
            self._operations = self._driver.add(partial(Operations, accelerator, progress))

    def batches(self, loader: Any, **options: Any) -> Any:
        """Iterate over `loader` as in `torch_join.Join`; a prepared loader is returned unchanged.

        Raises:
            JoinValueError: A `placeholder` is passed for a prepared loader.
        """
        if is_prepared(loader) and options.get("placeholder") is not None:
            raise JoinValueError(
                "join.batches(loader, placeholder=...) got a loader that Accelerate has prepared. Pass placeholder= to"
                " join_uneven_inputs or join_batches instead, for all loops."
            )
        return loader if is_prepared(loader) else super().batches(loader, **options)

    def _iterate(self, own_iter: Callable[[PreparedLoader], Iterator[Any]], loader: PreparedLoader) -> Iterator[Any]:
        """Yield the batches of `loader`; all ranks leave the loop together, in the same state."""
        if own_loops.finish(self._accelerator):  # the context has ended, so this loop is outside it
            yield from loader
            return
        reader = self._driver.reader
        if reader is not None and reader.pulling:  # the loop is over an object that contains it, such as a zip
            yield from own_iter(loader)
        else:
            iteration, options = getattr(loader, "iteration", 0), self._driver.options
            running = _positions.recording_loop(self._accelerator, loader, options.rebalance)
            with running as (own, is_at_end, loop):
                reader_of = partial(PreparedReader, partial(loop.iterate, own_iter), self._driver.counts, is_at_end)
                try:
                    for batch in self._driver.go_through(own, reader_of):
                        loop.reader = loop.reader or self._driver.reader
                        if (placeholders := self._driver.placeholders) is not None and placeholders.losses.joined:
                            # Look like an active rank: here Accelerate's own loop has ended, and has counted the epoch.
                            with _compat.active_loader(loader), setting(loader, iteration=iteration):
                                yield batch
                        else:
                            loop.has_batch = True
                            yield batch
                finally:
                    if self._accelerator.gradient_state.active_dataloader is loader:
                        loader.end()  # Accelerate does not notice that a loop was left
                if options.placeholder is not None and hasattr(loader, "iteration"):
                    loader.iteration = iteration + 1  # Accelerate does not count an epoch without batches

    def _note_epoch(self, loader: Any) -> None:
        """Record that this rank starts a loop over a loader that Accelerate has not prepared."""
        steps = self._driver.plain_steps
        self._mixes = self._mixes or self._began.get(id(loader), steps) < steps
        self._began[id(loader)] = steps

    def _warn_of_mixed_epochs(self) -> None:
        """Warn, on a process that ran out early, that its epochs did not coincide with those of the other processes."""
        if self._mixes and not self._driver.members.last_joiner:
            JoinDataWarning.warn(
                f"Rank {self._driver.members.name} finished before others, so the ranks were in different epochs: in"
                " one join_uneven_inputs, the loop ran several times over a DataLoader that Accelerate has not"
                " prepared. Loop over `join.batches(loader)`, or over accelerator.join_batches(loader) without the"
                " `with`, or use one `with` per epoch."
            )
