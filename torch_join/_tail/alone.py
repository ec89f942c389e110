"""The driver of a `Join` with `enable=False`: each rank loops over its own batches without the other ranks."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from torch_join._base.closing import is_left_on_purpose
from torch_join._base.errors import JoinValueError
from torch_join._control.channel import Channel
from torch_join._monitor.records import Stopwatch
from torch_join._participants.options import Options
from torch_join._schedule.placeholders import Placeholder
from torch_join._tail.batch_loop import BatchLoop, Place
from torch_join._tail.loop import LoopDriver
from torch_join._tail.reader import Reader
from torch_join._tail.resuming import OVER, NamedLoops, state_of

T = TypeVar("T")


class AloneDriver(LoopDriver):
    """A `LoopDriver` that never communicates with other ranks.

    Raises:
        JoinValueError: The user passed a monitor, and there is more than one rank.
    """

    def __init__(self, objects: list[Any], options: Options, group: Any) -> None:
        super().__init__(objects, options, group)
        if options.monitor is not None and self.members.world_size > 1:
            raise JoinValueError(
                "monitor= cannot be combined with enable=False: the ranks do not communicate, so they cannot compare"
                " their inputs. Remove monitor=."
            )
        self.rebalancing.enabled = False
        self.named = NamedLoops(0, 1)
        self.positions, self.find_other_place = self.named.current, self.named.find_others

    def _make_participants(self) -> None:
        pass

    def enter(self, open_channel: Callable[[], Channel]) -> None:
        pass

    def finish(self, error: BaseException | None) -> None:
        if self.loop is None or self.loop.driver is None:
            return
        # After a `break`, a `with` inside a generator ends with a `GeneratorExit`.
        if error is None or isinstance(error, GeneratorExit):
            self.loop.measure()
        else:
            self.loop.stopwatch = None

    def leave(self) -> None:
        self.signals.restore()
        if self.loop is not None:
            self.loop.drop()

    def meet(self) -> None:
        pass

    def weigh(self, value: Tensor) -> Tensor:
        return value

    def stop_requested(self) -> bool:
        if self.members.world_size > 1:
            raise JoinValueError(
                "join.stop_requested() cannot be combined with enable=False: the ranks do not communicate, so each"
                " would stop at its own step. Remove enable=False."
            )
        self.signals.listen()
        return self.signals.received

    def state_dict(self) -> dict[str, Any]:
        return state_of([self.find_place()], self.in_loop, self.named.name, [self.named.find_others()])

    def go_through(
        self,
        loader: Iterable[T],
        reader_of: Callable[[Iterable[T]], Reader[T]] = Reader,
        asks: bool = True,
        name: str | None = None,
        placeholder: Placeholder | None = None,
    ) -> Iterator[T]:
        if not self.in_loop:
            self.finish(None)
        first, reader = self._open(loader, reader_of, name)
        loop = self.loop = BatchLoop(self, reader, True, 0, first)
        self.place, self.step_number = Place.LOOP, loop.first
        watch = Stopwatch(loop.first)
        loop.stopwatch = None if self.options.monitor is None or first == OVER else watch
        count, counted = None if loop.stopwatch is None else self.members.count, None
        try:
            while reader.has_next():
                counted = None if count is None else reader.count(count)
                batch = reader.take()
                watch.take()
                yield batch
                watch.ask(counted)
                self.step_number += 1
        except GeneratorExit:
            reader.leave()
            watch.leave(counted)
            if not is_left_on_purpose():  # an error ended the loop, so this epoch is not measured
                loop.stopwatch = None
            raise
        finally:
            self.place = Place.ENDED
        loop.measure()

    def _begin_later(self, loader: Iterable[T], name: str, placeholder: Placeholder | None) -> Iterator[T]:
        return self.go_through(loader, name=name)
