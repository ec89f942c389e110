"""`Join`: torch's context for uneven inputs, made exact."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable

from torch_join import _nesting
from torch_join._errors import JoinError
from torch_join._hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._meetings import Meetings
from torch_join._reader import Reader
from torch_join._rendezvous import open_channel
from torch_join._tap import CollectiveTap
from torch_join._weighting import resolve_weighting
from torch_join.joinables import CustomPart, ModelPart, make_parts, unwrap

T = TypeVar("T")

_BEGIN = tuple[int | None, Hyperparameters]  # of a loop
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Join(Meetings, TorchJoin):
    """Train on uneven inputs in a plain loop, exactly.

    ```python
    with Join([ddp, optimizer, scheduler]) as join:
        for batch in join.batches(loader):
            ...
    ```

    A rank that has run out of inputs serves the others: it takes part in the gradients' all-reduce
    with zeros, and in any other collective of the step with a neutral value. When the last rank is
    done, its state (of everything given) is handed over to the others, and all leave the loop
    together. A plain `for` over the loader works too, with a heartbeat at each forward of a model.

    Args:
        joinables: DDP models, optimizers, LR schedulers, `GradScaler`s, torch `Joinable`s, and anything
            with `state_dict` and `load_state_dict`; the same on every rank, in the same order.
        enable: `False` makes the context do nothing: `batches` passes on its loader's, and every rank is active.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out of inputs
            while others have some.
        weighting: How the gradients of the active ranks are combined, see `resolve_weighting`.
        heartbeat: Whether ranks meet in each step, also where lengths are certain; needed where ranks may
            `break` out of their loops at different steps.
        timeout: How long a rank waits for another, by default 30 minutes.
        **kwargs: Forwarded to every `join_hook`; `divide_by_initial_world_size` is understood too.

    Raises:
        ValueError: `joinables` is empty, or has different process groups.
        JoinTypeError: One of them is of a type that cannot take part.
        EarlyTerminationError: See `throw_on_early_termination`.
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        weighting: str | None = None,
        heartbeat: bool = False,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            raise ValueError("The join context manager requires at least one joinable")
        joinables = [unwrap(thing) for thing in joinables]
        weighting = resolve_weighting(weighting, kwargs.get("divide_by_initial_world_size"))
        Meetings.__init__(
            self, _common_group(joinables), list(joinables), weighting, throw_on_early_termination, heartbeat
        )
        self._enable = enable
        self._timeout = timeout
        self._options = kwargs
        self._first_custom: CustomPart | None = None
        self._has_model = False
        if enable:
            self._make_parts()

    def _reset(self) -> None:
        super()._reset()
        self._in_loop = self._left_loop = False
        self._loop: object = None  # the current one
        self._reader: Reader[Any] | None = None  # of the last one
        self._stepped = True  # the step's batch has been used
        self._forwarded = False  # this loop runs forwards of a model that was given
        self._loop_done = False  # the last that happened was a loop over `batches`

    def __enter__(self) -> "Join":
        if self._enable:
            _nesting.enter(self)
            self._reset()
            if not self._parts:  # it has been left before
                self._make_parts()
            try:
                self._open(open_channel(self.group, self._timeout))
                self._compare_lists()
                for part in self._parts:
                    part.enter()
            except BaseException:
                self._leave_nothing()
                raise
        return self

    def batches(self, loader: Iterable[T]) -> Iterable[T]:
        """Go through the batches of `loader`; all ranks leave the loop together, in one common state.

        A length that is certain (of a map-style dataset, of a list) is exchanged once, and a step then
        costs one request to the store. Elsewhere the ranks meet at each batch.

        Args:
            loader: This rank's batches, which may be none.

        Returns:
            This rank's batches, to loop over once. It is no iterator: a progress bar that holds it does not keep
            a loop open that has been left by `break`.
        """
        return _Batches(self._batches, loader)

    def _batches(self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]] = Reader) -> Iterator[T]:
        if not self._enable:
            self.step = 0
            for batch in loader:
                yield batch
                self.step += 1
            return
        with self._telling():
            if self._in_loop:
                raise JoinError(
                    "A loop over join.batches was begun inside another one, or while another one that was left by"
                    " `break` is still held in a variable (a progress bar, for example): ranks that have joined cannot"
                    " follow. Close it (`del` it), begin one after the other has ended, or loop over both at once:"
                    " join.batches(zip(a, b))."
                )
            self._arrive()
            reader = self._reader = reader_of(loader)
            length = None if self.may_break else reader.certain_length()
            if length is not None and reader.corrects and (real := reader.length_if_known(0)) is not None:
                length = real  # the others could not hear in time of a loader that turns out empty
            said = self._channel.gather((length, hyperparameters(self._objects)), self.in_plain_loop, _BEGIN)
            compare([theirs for _, theirs in said])
            lengths = [theirs for theirs, _ in said]
            self._channel.forget()  # what the last loop has left: all have read it
            if self.may_break:
                self._tap.install()
        self._in_loop, self.step, self._forwarded = True, 0, False
        self._loop = mine = object()
        certain = None if None in lengths else [length for length in lengths if length is not None]
        try:
            while True:
                with self._telling():
                    goes_on = self._next_step(reader, certain)
                if not goes_on:
                    break
                self._stepped = not self._has_model
                yield reader.take()
                self.step += 1
        except GeneratorExit:
            if self._loop is mine:
                self._abandon()
            raise
        finally:
            if self._loop is mine:
                self._in_loop, self._loop_done = False, True
                if not self._tail:
                    self._tap.remove()

    def __exit__(
        self,
        type: type[BaseException] | None,  # noqa: A002  torch's name
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        try:
            with self._telling():
                if value is not None:
                    raise value
                if self._in_loop:  # left by `break`, while a variable holds its iterator
                    self._abandon()
                self._return_to_loop()
                verdict = self._last_joiner
                self._leave()
                if self._loop_done:
                    self._last_joiner = verdict
                for part in self._parts:
                    part.after_all(self._last_joiner)
                compare(self._channel.gather(hyperparameters(self._objects), of=Hyperparameters))
                # Whoever hosts the channel's store must not be gone while others still read from it.
                if self._world_size > 1:
                    dist.barrier(self.group)
                self._channel.forget()
                self._channel.close()
        except BaseException as error:
            if error is not value:
                raise
        finally:
            self._leave_nothing()

    def _leave_nothing(self) -> None:
        self._tap.remove()
        self._awaited, self._has_said, self._left_loop = None, False, False
        for part in self._parts:
            part.exit()
        self._channel.leave()
        _nesting.leave(self)
        # These refer to this object, and it to the group, whose threads must not outlive the interpreter.
        self._parts, self._first_custom = [], None
        self._tap = CollectiveTap(lambda _: None, None)

    def _make_parts(self) -> None:
        self._tap = self._new_tap()
        self._parts = make_parts(self, self._objects, self._options)
        self._first_custom = next((p for p in self._parts if isinstance(p, CustomPart)), None)
        self._has_model = any(isinstance(p, ModelPart) for p in self._parts)

    # ------------------------------------------------------------ what the parts call

    @property
    def in_plain_loop(self) -> bool:
        """Whether this rank may be in, or after, a loop that is not over `batches`."""
        return not self._in_loop and not self._loop_done

    def before_forward(self, samples: int, waits: bool = True) -> None:
        """Meet the other ranks, if this forward stands outside of `batches`.

        Args:
            samples: This step's number of samples.
            waits: Whether it is important, for what this forward does, who is active.
        """
        if not self._in_loop:
            self._heartbeat(samples)
        self._stepped = self._forwarded = True
        # As long as the tap listens, nothing that others take part in can come before the answer is asked for.
        self._arrive(waits or self._throws or not self._tap.installed)

    def before_notice(self, part: CustomPart) -> None:
        """Meet the other ranks, if there is no model whose forward does and this joinable is the first."""
        if not self._in_loop and not self._has_model and part is self._first_custom:
            self._heartbeat(0)
        self._arrive()

    # ------------------------------------------------------------ loops

    def _heartbeat(self, samples: int) -> None:
        self._arrive()
        self._loop_done = False
        self._awaited = samples, False
        self.step += 1

    def _abandon(self) -> None:
        self._loop, self._in_loop, self._left_loop, self._loop_done = None, False, True, False
        if self._awaited is not None and not self._has_said:  # nobody counts on this step
            self._awaited, self._stepped = None, True
        if not (self._tail or self.may_break):  # else whatever comes next with others finishes the loop first
            self._tap.remove()

    def _return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`."""
        if self._left_loop and not self.serving:
            self._left_loop = False
            if self.may_break and self._forwarded and not self._stepped:
                raise JoinError(
                    f"Rank {self.rank} left its loop at step {self.step} after it had taken a batch and before the"
                    " model's forward, where the other ranks already count on it. Break at the end of a step."
                )
            with self._telling():
                self._leave()
            self._loop_done = True
            if not self._tail:
                self._tap.remove()


class _Batches(Generic[T]):
    def __init__(self, go_through: Callable[[Iterable[T]], Iterator[T]], loader: Iterable[T]) -> None:
        self._go_through = go_through
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return self._go_through(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


def _common_group(joinables: Sequence[Any]) -> Any:
    groups = [j.join_process_group for j in joinables if isinstance(j, Joinable)]
    if any(group != groups[0] for group in groups):
        raise ValueError("Using join context manager with multiple process groups")
    return groups[0] if groups else dist.group.WORLD
