"""The loops of a `Join`: how one is gone through, left and finished."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader

from torch_join._base.errors import JoinError, name_ranks
from torch_join._base.hyperparameters import Hyperparameters, compare, hyperparameters
from torch_join._base.weighting import Weighting
from torch_join._handover.departure import Departure
from torch_join._tail import nesting as _nesting
from torch_join._tail.meetings import Meetings
from torch_join._tail.reader import Batches, Reader
from torch_join.joinables import CustomPart

T = TypeVar("T")

_BEGIN = tuple[int | None, Hyperparameters, str]  # of a loop
# How a rank begins it: by asking for a batch, or because its user has not, and it has none or has some.
_ASKS, _EMPTY, _UNASKED = "asks", "empty", "unasked"


class Loops(Meetings):
    """Goes through loops over `batches` and, from forward to forward, through others.

    Args:
        group: The process group.
        objects: Everything that was given to `Join`.
        enable: `False` has ranks know nothing of each other.
        weighting: How the gradients of the active ranks are combined.
        throws: Whether to raise when the first rank runs out of inputs while others have some.
        may_break: Whether a rank may leave a loop in any step.
    """

    def __init__(
        self, group: Any, objects: list[Any], enable: bool, weighting: Weighting, throws: bool, may_break: bool
    ) -> None:
        super().__init__(group, objects, weighting, throws, may_break)
        self._enable = enable
        # Loops of which there is an iterator that has not been asked for a batch yet, in order.
        self._unbegun: dict[object, Callable[[], Iterator[Any]]] = {}
        self._first_custom: CustomPart | None = None
        self._has_model = False

    def _reset(self) -> None:
        super()._reset()
        self._in_loop = self._left_loop = self._asked = False
        self._left = None
        self._loop: object = None  # the current one
        self._reader: Reader[Any] | None = None  # of the last one
        self._certain: list[int] | None = None  # all ranks' lengths in it
        self._stepped = True  # the step's batch has been used
        self._forwarded = False  # this loop runs forwards of a model that was given
        self._loop_done = False  # the last that happened was a loop over `batches`

    # A DataLoader's own iterator is one of `Any`.
    @overload
    def batches(self, loader: DataLoader[T]) -> Iterable[T]: ...
    @overload
    def batches(self, loader: Iterable[T]) -> Iterable[T]: ...
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
        return Batches(self._begin_later, loader)

    def _begin_later(self, loader: Iterable[T]) -> Iterator[T]:
        """Go through `loader` from the first `next` on, or from where it should have come to that."""
        ticket = object()
        if self._enable:
            self._unbegun[ticket] = lambda: self._batches(loader, asks=False)
        return self._in_order(ticket, loader)

    def _in_order(self, ticket: object, loader: Iterable[T]) -> Iterator[T]:
        if self._enable:
            if ticket in self._unbegun:
                self._begin_overdue(ticket)
            elif _nesting.is_entered(self):
                with self._telling():
                    raise self._left_behind()
            self._unbegun.pop(ticket, None)
        yield from self._batches(loader)

    def _begin_overdue(self, until: object = None) -> None:
        """Go through loops that others are in, and that here nobody has asked for a batch: a rank may have none."""
        for ticket in [*self._unbegun]:
            if ticket is until:
                break
            for _ in self._unbegun.pop(ticket)():
                pass

    def _batches(
        self, loader: Iterable[T], reader_of: Callable[[Iterable[T]], Reader[T]] = Reader, asks: bool = True
    ) -> Iterator[T]:
        if not self._enable:
            self.step = 0
            for batch in loader:
                yield batch
                self.step += 1
            return
        with self._telling():
            _nesting.check_entered(self)
            if self._in_loop and self._reader is not None and not self._reader.has_next():
                self._abandon(at_once=False)  # a loop by iter() and next(), which never asks for the end
            if self._in_loop:
                raise JoinError(
                    "A loop over join.batches was begun inside another one, or while another one that was left by"
                    " `break` is still held in a variable (a progress bar, for example): ranks that have joined cannot"
                    " follow. Close it (`del` it), begin one after the other has ended, or loop over both at once:"
                    " join.batches(zip(a, b))."
                )
            self._arrive()
            reader = self._reader = reader_of(loader)
            for model in self._models():
                model.check_can_train(reader.has_next)
            length = None if self.may_break else reader.certain_length()
            if length is not None and reader.corrects and (real := reader.length_if_known(0)) is not None:
                length = real  # the others could not hear in time of a loader that turns out empty
            how = _ASKS if asks else _UNASKED if reader.has_next() else _EMPTY
            said = self._channel.gather((length, hyperparameters(self._objects), how), self.in_plain_loop, _BEGIN)
            compare([theirs for _, theirs, _ in said])
            lengths = [theirs for theirs, _, _ in said]
            self._channel.forget()  # what the last loop has left: all have read it
            ways = [way for _, _, way in said]
            if _ASKS not in ways:
                return  # nobody goes through it
            self._refuse_unasked([rank for rank, way in enumerate(ways) if way == _UNASKED])
            if self.may_break:
                self._tap.install()
        self._in_loop, self._asked, self.step, self._forwarded = True, asks, 0, False
        self._steps.forget()
        for model in self._models():
            model.begin_loop()
        self._loop = mine = object()
        certain = None if None in lengths else [length for length in lengths if length is not None]
        self._certain = certain
        try:
            while True:
                with self._telling():
                    goes_on = self._next_step(reader, certain)
                if not goes_on:
                    break
                self._stepped = not self._has_model
                yield reader.take()
                if self._loop is not mine:
                    self._end_late(reader)
                    return
                self.step += 1
        except GeneratorExit:
            if self._loop is mine:
                self._abandon()
            raise
        finally:
            if self._loop is mine:
                self._in_loop = False
                self._finish_loop()

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
            if self.weighting == "samples":
                self._tap.install()
        self._stepped = self._forwarded = True
        # As long as the tap listens, nothing that others take part in can come before the answer is asked for.
        late = self._tap.installed and (self._in_loop or self._tail)
        self._arrive(waits or self._throws or not late)

    def before_notice(self, part: CustomPart) -> None:
        """Meet the other ranks, if there is no model whose forward does and this joinable is the first."""
        if not self._in_loop and not self._has_model and part is self._first_custom:
            self._heartbeat(0)
        self._arrive()

    # ------------------------------------------------------------ loops

    def _heartbeat(self, samples: int) -> None:
        self._arrive()
        self._loop_done = False
        self._steps.begin()
        self._awaited = samples, False
        self.step += 1

    def _abandon(self, at_once: bool = True) -> None:
        """Leave a loop by `break`; `at_once` unless this rank's own code has gone on since."""
        for model in () if self._tail else self._models():
            model.begin_step()
        # Where no rank can run out before another, nothing will be handed over.
        ends = self._tail or self._certain is None or min(self._certain) <= self.step + 1 < max(self._certain)
        watches = at_once and ends and self._world_size > 1
        self._left = Departure(self._objects, self._replicated if watches else None)
        self._loop, self._in_loop, self._left_loop, self._loop_done = None, False, True, False
        if self._awaited is not None and not self._has_said:  # nobody counts on this step
            self._awaited, self._stepped = None, True
        if not (self._tail or self.may_break):  # else whatever comes next with others finishes the loop first
            self._tap.remove()

    def _return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`."""
        if self._left_loop and not self.serving:
            self._left_loop = False
            if self._left is not None:
                self._left.meet()
            if self.may_break and self._forwarded and not self._stepped:
                raise JoinError(
                    f"Rank {self.rank} left its loop at step {self.step} after it had taken a batch and before the"
                    " model's forward, where the other ranks already count on it. Break at the end of a step."
                )
            with self._telling():
                if self._certain is None or self._reader is None:
                    self._leave()
                else:  # those who left with their last batch have ended, as the others know
                    self.step += 1
                    self._steps.now = False
                    if self._find_out(self._reader, self._certain):
                        self._leave()
            self._finish_loop()

    def _finish_loop(self) -> None:
        self._left = None
        self._loop_done = True
        self._steps.forget()
        if not self._tail:
            self._tap.remove()

    def _end_late(self, reader: Reader[Any]) -> None:
        if reader.has_next():
            raise self._left_behind()

    @staticmethod
    def _left_behind() -> JoinError:
        return JoinError(
            "A loop over join.batches went on after it had been left: its `with` has ended, or another loop has begun,"
            " of an iterator that was made later. Begin a new loop."
        )

    @staticmethod
    def _refuse_unasked(ranks: list[int]) -> None:
        if ranks:
            raise JoinError(
                f"{name_ranks(ranks).capitalize()} made an iterator over join.batches and asked it for no batch, though"
                " there are some, while other ranks go through that loop. Make as many calls of next() as there are"
                " batches on this rank, or leave such loops at the same step on all ranks."
            )
