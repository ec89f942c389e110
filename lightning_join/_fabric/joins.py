"""The common part of the Fabric strategies: everything except setting up a model."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_join import _compat_fabric as _compat
from lightning_join._collectives import active_places, is_mean, neutral
from lightning_join._fabric.joined_loader import JoinedLoader
from lightning_join._fabric.operations import Operations
from lightning_join._reading.samplers import is_dealt_out, mark_injected, without_padding
from torch_join import Join, JoinError, JoinMonitor, UnsupportedError, Weighting
from torch_join.integration import (
    Channel,
    LoaderPlace,
    LoopDriver,
    ModelShadow,
    Often,
    Options,
    Placeholder,
    driver_of,
    gather_given,
    gather_objects,
    holds_parts,
    is_length_certain,
    join_with,
    own_loops,
    refuse_misspelt,
    renamed,
    setting,
    state_of,
    telling_failures,
)

T = TypeVar("T")

_BATCHES = "over both at once: `for a, b in fabric.strategy.batches(zip(a, b))`"


class Joins:
    """A Fabric strategy whose dataloaders serve other ranks; a base class before `ActiveCollectives` and Fabric's.

    Args:
        *args: The positional arguments of the Fabric strategy.
        joinables: Objects that take part in addition to those that were set up: averages, metrics, LR schedulers.
        weighting: As in `torch_join.Join`, like all other arguments.
        monitor: A `torch_join.JoinMonitor`, whose values also go to Fabric's loggers.
        **kwargs: The keyword arguments of the Fabric strategy.

    Attributes:
        joinables: The argument; it may be changed at any time outside of loops.
        fabric: The `Fabric` that uses this strategy, once an object has been set up.
    """

    precision: Any
    world_size: int
    _launcher: Any
    _timeout: timedelta | None
    fabric: Fabric | None = None
    _driver: LoopDriver | None = None  # of the open context
    _operations: Operations | None = None
    _within: str | None = None  # describes a nested loop in which ranks cannot communicate
    _deals_out = False  # whether a loader's sampler divides a dataset among the ranks
    _numbered = 0  # the number of loaders that were set up
    _inner = 0  # the number of loops that run inside the current one

    @renamed
    def __init__(
        self,
        *args: Any,
        weighting: Weighting | None = Options.weighting,
        divide_by_initial_world_size: bool | None = None,
        joinables: Iterable[Any] = (),
        throw_on_early_termination: bool = False,
        may_break: bool = False,
        audit: Often = Options.audit,
        hand_over_ignored: bool | None = None,
        hand_over_buffers: bool | None = None,
        backward_collectives: bool = False,
        rebalance: bool = False,
        placeholder: Placeholder | None = None,
        monitor: JoinMonitor | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_misspelt(*kwargs, owner=type(self).__name__)
        super().__init__(*args, **kwargs)
        self.joinables: list[Any] = list(joinables)
        self._set_up: list[Any] = []
        timeout = Options.timeout if self._timeout is None else self._timeout
        self.options = Options.of(locals())

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        if isinstance(self._launcher, _compat.MultiProcessingLauncher):
            self._launcher.__class__ = _Launcher

    def __repr__(self) -> str:
        # Appears in the error with which a Trainer refuses this object.
        return f"<{type(self).__module__}.{type(self).__name__}, for Fabric>"

    # ------------------------------------------------------------ for scripts

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have a batch in the current step."""
        return tuple(range(self.world_size)) if self._driver is None else self._driver.find_active()

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches in the current loop."""
        return self._driver is not None and self._driver.members.rank not in self._driver.find_active()

    @property
    def at_last_step(self) -> bool:
        """Whether this is the last step on all ranks."""
        return self._driver is not None and self._driver.find_last_step()

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Wrap any iterable, such as a `zip` of two loaders, so that it works like a set-up dataloader."""
        return self._joined(loader)

    @contextmanager
    def joining(self, *loaders: Iterable[Any]) -> Iterator[Join]:
        """Return a context for loops over loaders that were set up; all ranks leave it together.

        When the context exits, all ranks have the same state even after a `break`, and an exception on one rank raises
        on all. Without the context, other ranks notice a `break` or an exception only in their next collective.

        Args:
            *loaders: The loaders of the loops inside: loaders that were set up, or `strategy.batches(...)`.

        Yields:
            The `torch_join.Join` of these loops.
        """
        self.check_outside("fabric.strategy.joining was entered")
        for loader in loaders:
            if not isinstance(_compat.unwrap_objects(loader), JoinedLoader):
                raise JoinError(
                    f"fabric.strategy.joining got a {type(loader).__name__} that Fabric has not set up, so finished"
                    " ranks would not follow its loop. Pass the return value of fabric.setup_dataloaders or"
                    " fabric.strategy.batches."
                )
        with self._context(is_one_loop=False) as join:
            yield join

    def gather_in_order(
        self,
        rows: Any,
        indices: Any = None,
        rank: int | None = None,
        order: Literal["dataset", "shards"] | None = None,
    ) -> Any:
        """Return the results of all ranks, in order; all ranks call this after a loop.

        ```python
        rows, indices = [], []
        for batch in test_loader:
            rows.append({"logits": model(batch["x"]), "names": batch["names"]})
            indices.append(batch["index"])
        everything = fabric.strategy.gather_in_order(rows, indices)
        ```

        With indices, rows are sorted by index, and each index occurs once: the first row of the lowest rank that has
        it. With `order="shards"`, rows are sorted by rank, then by index, or by batch without indices.

        Args:
            rows: See `torch_join.Join.gather_in_order`.
            indices: See `torch_join.Join.gather_in_order`.
            rank: The rank that gets the result; by default all do.
            order: `"dataset"` (the default if there are `indices`): all ranks have the same dataset, and indices refer
                to it. `"shards"`: each rank has its own dataset.

        Returns:
            See `torch_join.Join.gather_in_order`.

        Raises:
            JoinValueError: On all ranks, if some rank's rows cannot be gathered, or if a sampler splits one dataset
                among the ranks and neither `indices` nor `order` is passed.
            JoinError: Some ranks have run out of batches while others have not.
        """
        own_loops.finish(self)
        if self._driver is not None:
            self._driver.check_together("fabric.strategy.gather_in_order")
        return gather_given(rows, indices, None, rank, order, self._deals_out)

    # ------------------------------------------------------------ set-up

    def note_set_up(self, thing: Any) -> None:
        """Make an object take part in all later loops, as long as it is referenced elsewhere."""
        if known := [weakref.ref(one) for one in self._set_up]:
            # Collect now, so that all ranks forget the same objects: a dropped object may be in a reference cycle.
            self._set_up.clear()
            gc.collect()
            self._set_up += [one for ref in known if (one := ref()) is not None]
        self._set_up.append(thing)

    def setup_module(self, module: nn.Module) -> Any:
        self.check_outside("A model was set up")
        wrapped = super().setup_module(module)  # type: ignore[misc]
        self.note_set_up(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.check_outside("An optimizer was set up")
        found: Optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        self.note_set_up(found)
        return found

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        found = super().setup_module_and_optimizers(module, optimizers, *scheduler)  # type: ignore[misc]
        for one in found[2:]:
            if one is not None:
                self.note_set_up(one)
        return found

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        mark_injected(kwargs, predicting=False)
        return kwargs

    def process_dataloader(self, dataloader: Any) -> Any:
        found: Any = without_padding(super().process_dataloader(dataloader))  # type: ignore[misc]
        self._deals_out = self._deals_out or is_dealt_out(found)
        return self._joined(found)

    @cached_property  # created after the launch: Fabric pickles this object to spawn processes
    def _loaders(self) -> "weakref.WeakValueDictionary[int, JoinedLoader[Any]]":
        return weakref.WeakValueDictionary()

    def _joined(self, loader: Iterable[T]) -> JoinedLoader[T]:
        if self._driver is not None and self._driver.in_loop:  # joined ranks do not run this
            return JoinedLoader(loader, self)
        self._numbered += 1
        joined = JoinedLoader(loader, self, self._numbered)
        self._loaders[joined.number] = joined
        return joined

    def _taking_part(self) -> list[Any]:
        scaler = getattr(self.precision, "scaler", None)
        given = [*self._set_up, *self.joinables, *([] if scaler is None else [scaler])]
        things = {id(thing): thing for thing in map(_compat.unwrap_objects, given)}
        # The last object is needed if there is no other, in an evaluation of a model that was not set up.
        return [*things.values(), SimpleNamespace(state_dict=dict, load_state_dict=dict)]

    # ------------------------------------------------------------ loops

    @contextmanager
    def _context(self, is_one_loop: bool = True) -> Iterator[Join]:
        join = join_with(self.options, self._taking_part())
        driver = driver_of(join)
        self._driver, self._operations = driver, driver.add(partial(Operations, self))
        driver.log_epoch, driver.framework = self.log_own, "lightning.fabric"
        try:
            with ExitStack() as stack:
                with own_loops.begin(self, driver if is_one_loop else None):
                    stack.enter_context(join)
                yield join
        finally:
            self._driver = self._operations = None
            if driver.reader is not None:
                driver.reader.drop()
        own_loops.may_end(self, driver)

    def go_through(self, joined: "JoinedLoader[T]", loader: Iterable[T]) -> Iterator[T]:
        """Iterate over `joined` on all ranks; `loader` is the loader that Fabric itself would iterate over."""
        driver = self._driver
        if driver is not None and driver.reader is not None and driver.reader.pulling:
            joined.is_within = True
            return iter(loader)  # the loop is over an object that contains it, such as a zip
        own_loops.finish(self)
        joined.set_epochs(loader)
        if (driver := self._driver) is None:
            read = partial(self._read, joined)
            return iter(own_loops.Loop(self, loader, self._context, read, True, "fabric.barrier()"))
        return self._nested(driver, loader) if driver.in_loop else self._read(joined, None, loader)

    def _read(self, joined: "JoinedLoader[T]", _: Join | None, loader: Iterable[T]) -> Iterator[T]:
        driver = self._driver
        assert driver is not None  # that of the loop's `Join`, which is entered
        if (loaded := driver.positions.loaded) is not None:  # by the `Join` of `joining`
            joined.positions.load(loaded)
            driver.positions.loaded = None
        driver.positions, driver.find_other_place = joined.positions, self._find_place
        for batch in driver.go_through(loader, joined.open):
            yield batch
            if self._inner:
                with telling_failures(driver.tail_log.channel):
                    raise JoinError(
                        "A loop over a Fabric dataloader requested its next batch before an inner loop had ended. To"
                        f" read two loaders in a single loop, go {_BATCHES}. If a variable (a progress bar, for"
                        " example) holds the inner loop's iterator, `del` it when you leave that loop."
                    )

    def _nested(self, driver: LoopDriver, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader inside another loop, such as a validation every few steps: no rank has joined yet."""
        channel = driver.tail_log.channel
        with telling_failures(channel):
            self._check_nested(driver)
            length = len(loader) if is_length_certain(loader) else None  # type: ignore[arg-type]
            lengths = channel.gather(length, of=int | None)
        self._inner += 1
        try:
            if None not in lengths and len({*lengths}) == 1:
                yield from loader
            else:
                with self._apart(driver):
                    yield from loader
        finally:
            self._inner -= 1

    def _check_nested(self, driver: LoopDriver) -> None:
        certain = driver.certain_lengths
        uneven = len(driver.find_active()) < self.world_size
        if uneven or (certain is not None and min(certain) != max(certain)):
            tense = "have run out" if uneven else "will run out"
            raise JoinError(
                f"A loop over a Fabric dataloader was started inside another loop in which some ranks {tense} of"
                " batches before others, so they would miss the inner loop. Evaluate after the loop, give the inner"
                f" loop a DataLoader that Fabric has not set up, or go {_BATCHES}. If a variable holds the iterator"
                " of a finished outer loop, `del` it."
            )

    @contextmanager
    def _apart(self, driver: LoopDriver) -> Iterator[None]:
        """Return a context for a loop in which ranks may have different numbers of batches and do not serve others."""
        models: list[Any] = [participant.modules[0] for participant in driver.tail_log.models()]
        within = "a loop over a Fabric dataloader, inside another one, where ranks may have different numbers"
        with ExitStack() as stack:
            for model in models:
                if getattr(model, "broadcast_buffers", False):  # once, instead of in each forward
                    ModelShadow(model, watches=False).sync_buffers(0)
                    stack.enter_context(setting(model, broadcast_buffers=False))
                stack.callback(model.register_forward_pre_hook(_refuse_training).remove)
            stack.enter_context(setting(self, _within=within))
            yield

    def check_outside(self, what: str) -> None:
        own_loops.finish(self)
        if self._driver is not None:
            with telling_failures(self._driver.tail_log.channel):
                raise JoinError(
                    f"{what} inside a loop over a Fabric dataloader, which is too late to take part in that loop. Do"
                    " this before the loop. If a variable still holds the iterator of a finished loop, `del` it."
                )

    # ------------------------------------------------------------ operations

    def find_tail(self) -> Operations | None:
        """Return the operations of an active rank while some rank has finished; otherwise `None`.

        This may wait for other ranks, to finish a loop that was left and to find the active ranks of the step.
        """
        own_loops.finish(self)
        found = self._operations
        return found if found is not None and found.tail_log.meet() else None

    def find_step_ranks(self) -> tuple[int, ...] | None:
        """See `ActiveCollectives`, and `find_tail`."""
        if self._within is not None and self._driver is not None:
            with telling_failures(self._driver.tail_log.channel):
                raise JoinError(
                    f"An operation of all ranks was called in {self._within} of batches. Move the call after that loop."
                )
        return None if (self.find_tail() or self.find_placeholders()) is None else self.active_ranks

    def find_placeholders(self) -> Operations | None:
        """Return the operations in a step in which some ranks run placeholders and make all calls; else `None`."""
        found = self._operations
        if found is None or found.driver.placeholders is None or len(self.active_ranks) == self.world_size:
            return None
        return found

    @property
    def all_call(self) -> bool:
        return self._driver is not None and self._driver.placeholders is not None

    @property
    def in_placeholder(self) -> bool:
        placeholders = None if self._driver is None else self._driver.placeholders
        return placeholders is not None and placeholders.losses.joined

    @property
    def meets_over(self) -> Channel | None:
        """The channel on which the ranks can meet; `None` outside of a loop."""
        return None if self._driver is None else self._driver.tail_log.channel

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        ranks = self.find_step_ranks()
        own = super().all_reduce  # type: ignore[misc]
        if self.in_placeholder and ranks is not None and isinstance(tensor, Tensor):
            tensor.copy_(neutral(tensor, reduce_op))
        if ranks is None or not is_mean(reduce_op) or not isinstance(tensor, Tensor):
            return own(tensor, group, reduce_op)
        total = own(tensor, group, "sum")
        return total.copy_(total / len(active_places(ranks, group)))  # in place, as Fabric promises

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.find_step_ranks()
        super().barrier(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------ checkpoints

    def state_of_loader(self, joined: JoinedLoader[Any]) -> dict[str, Any]:
        """Return every rank's position in a loader that was set up; all active ranks call this."""
        own_loops.finish(self)
        name, driver = "fabric.save() with a dataloader", self._driver
        is_current = driver is not None and driver.positions is joined.positions
        with nullcontext() if driver is None else telling_failures(driver.tail_log.channel):
            if joined.is_within and not is_current:
                raise UnsupportedError(
                    f"{name} was called for a loader inside another iterable, such as `fabric.strategy.batches(zip(a,"
                    " b))`, so Fabric cannot tell how many of its batches were trained on. Wrap both loaders in an"
                    " object with an `__iter__`, pass it to `fabric.strategy.batches`, and save what that returns."
                )
            if driver is not None and not joined.number and not is_current:
                raise JoinError(
                    f"{name} was called for a loader that was set up inside a loop, where finished ranks did not set"
                    " it up. Set up the loader before the loop."
                )
        if driver is None:
            return state_of(gather_objects(joined.positions.find_place(), "The state of a loader", None), in_loop=False)
        return state_of(driver.gather_places(name, 0 if is_current else joined.number), is_current and driver.in_loop)

    def _find_place(self, number: int) -> LoaderPlace | None:
        joined = self._loaders.get(number)
        return None if joined is None else joined.positions.find_place()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  Fabric's name
    ) -> None:
        tail = self.find_tail()
        if tail is not None and (tail.driver.find_main_joined() or tail.holds_parts(state)):
            tail.save(path, state, storage_options, filter)
        else:
            if self._driver is not None and self._driver.placeholders is not None:
                self._driver.placeholders.bring_buffers()
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if (tail := self.find_tail()) is not None:
            with telling_failures(tail.tail_log.channel):
                raise UnsupportedError(
                    "fabric.load was called in a step in which some ranks have no batch, so only the others would"
                    " load. Load before or after the loop."
                )
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def save_own(self, path: Any, state: dict[str, Any], storage_options: Any) -> None:
        """Save a checkpoint as Fabric's own strategy does; each rank that takes part in saving calls this."""
        super().save_checkpoint(path, state, storage_options)  # type: ignore[misc]

    def log_own(self, metrics: dict[str, Any], step: int | None) -> None:
        """Log values to this rank's loggers."""
        for logger in [] if self.fabric is None else self.fabric.loggers:
            logger.log_metrics(metrics=metrics, step=step)


class _Launcher(_compat.MultiProcessingLauncher):
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Spawned processes end without running `atexit` and `sys.excepthook`.
        return super().launch(partial(own_loops.to_the_end, function), *args, **kwargs)


def _refuse_training(model: nn.Module, _: Any) -> None:
    if torch.is_grad_enabled() or holds_parts(model):
        raise JoinError(
            "A model that Fabric has set up was called, with gradients or while sharded, in a Fabric loop inside"
            " another one. Ranks may have different numbers of batches there, and finished ranks do not follow the"
            f" others. Evaluate under torch.no_grad(), run one loop after the other, or go {_BATCHES}."
        )
