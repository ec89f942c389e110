"""`Join`: torch's context for uneven inputs, made exact."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable

from torch_join._errors import EarlyTerminationError, JoinError, JoinValueError
from torch_join._failures import telling_failures
from torch_join._reader import Reader, certain_length
from torch_join._rendezvous import open_channel
from torch_join._server import Server
from torch_join._weighting import resolve_weighting
from torch_join.joinables import CustomPart, ModelPart, make_parts

T = TypeVar("T")

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Join(Server, TorchJoin):
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
        enable: `False` makes the context do nothing.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out of inputs
            while others have some.
        weighting: How the gradients of the active ranks are combined, see `resolve_weighting`.
        heartbeat: Whether ranks meet at each batch even where lengths are certain; needed where ranks
            may `break` out of their loops at different steps.
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
        weighting = resolve_weighting(weighting, kwargs.get("divide_by_initial_world_size"))
        Server.__init__(self, _common_group(joinables), list(joinables), weighting)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._beats_always = heartbeat or weighting == "samples"
        self._timeout = timeout
        self._parts = make_parts(self, joinables, kwargs) if enable else []
        self._first_custom = next((p for p in self._parts if isinstance(p, CustomPart)), None)
        self._has_model = any(isinstance(p, ModelPart) for p in self._parts)
        self._in_loop = self._left_loop = False
        self._stepped = True  # the step's batch has been used
        self._loop_done = False  # the last that happened was a loop over `batches`
        self.step = 0

    # ------------------------------------------------------------ what users see

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of inputs."""
        return self.rank not in self._active

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have an input at the current step."""
        return self._active

    def __enter__(self) -> "Join":
        if self._enable:
            self._channel = open_channel(self.group, self._timeout)
            self._compare_lists()
            try:
                for part in self._parts:
                    part.enter()
            except BaseException:
                for part in self._parts:
                    part.exit()
                raise
        return self

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Go through the batches of `loader`; all ranks leave the loop together, in one common state.

        A length that is certain (of a map-style dataset, of a list) is exchanged once, and a step then
        costs one request to the store. Elsewhere the ranks meet at each batch.

        Args:
            loader: This rank's batches, which may be none.

        Yields:
            This rank's batches.
        """
        if not self._enable:
            yield from loader
            return
        with telling_failures(self._channel):
            self._return_to_loop()
            reader = Reader(loader)
            lengths = self._channel.gather(None if self._beats_always else certain_length(loader))
        self._in_loop, self.step = True, 0
        certain = None if None in lengths else [length for length in lengths if length is not None]
        try:
            while True:
                with telling_failures(self._channel):
                    goes_on = self._next_step(reader, certain)
                if not goes_on:
                    break
                self._stepped = not self._has_model
                yield reader.take()
                self.step += 1
        except GeneratorExit:
            self._left_loop = True
            raise
        finally:
            self._in_loop = False
            self._loop_done = not self._left_loop

    def __exit__(
        self,
        type: type[BaseException] | None,  # noqa: A002  torch's name
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        try:
            with telling_failures(self._channel):
                if value is not None:
                    raise value
                self._return_to_loop()
                verdict = self._last_joiner
                self._leave()
                if self._loop_done:
                    self._last_joiner = verdict
                for part in self._parts:
                    part.after_all(self._last_joiner)
        except BaseException as error:
            if error is not value:
                raise
        finally:
            self._tap.remove()
            for part in self._parts:
                part.exit()
        # Whoever hosts the channel's store must not be gone while others still read from it.
        if value is None:
            dist.barrier(self.group)

    # ------------------------------------------------------------ what the parts call

    def before_forward(self, samples: int) -> None:
        """Meet the other ranks, if this forward stands outside of `batches`."""
        self._stepped = True
        if not self._in_loop:
            self._heartbeat(samples)

    def before_notice(self, part: CustomPart) -> None:
        """Meet the other ranks, if there is no model whose forward does and this joinable is the first."""
        if not self._in_loop and not self._has_model and part is self._first_custom:
            self._heartbeat(0)

    # ------------------------------------------------------------ who is there

    def _next_step(self, reader: Reader[Any], certain: list[int] | None) -> bool:
        """Find out who is active at this step; serve if this rank is not. Return whether it is."""
        if certain is None:
            self._meet(reader.has_next(), reader.samples if self.weighting == "samples" else 0)
        else:
            self._correct(reader, certain)
            self._set_active(tuple(r for r, length in enumerate(certain) if length > self.step))
        return self._go_on()

    def _correct(self, reader: Reader[Any], lengths: list[int]) -> None:
        """Tell the others in time if this loader's length proves wrong, and hear of theirs."""
        real = reader.length_if_known(self.step)
        claimed = lengths[self.rank]
        if (real is None and self.step + 1 >= claimed) or (real is not None and real > claimed):
            raise JoinValueError(
                f"The loader of rank {self.rank} said its length was {claimed} and goes on after that, which the other"
                " ranks cannot know in time. Mend its __len__, or use Join(..., heartbeat=True)."
            )
        if real is not None and real != claimed:
            self._channel.correct(real)
            lengths[self.rank] = real
        for rank, length in self._channel.corrections().items():
            lengths[rank] = length

    def _heartbeat(self, samples: int) -> None:
        self._return_to_loop()
        with telling_failures(self._channel):
            self._loop_done = False
            self._meet(True, samples)
            self._go_on()
        self.step += 1

    def _meet(self, has_input: bool, samples: int) -> None:
        """Say whether this rank has an input; the active ranks meet."""
        beat = self._channel.beat(samples, None if has_input else {}, participants=len(self._active))
        self._samples, self._total_samples = samples, beat.total
        self._set_active(tuple(rank for rank in self._active if rank not in beat.notices))

    def _go_on(self) -> bool:
        """Do what follows from who is active: throw, serve, begin or end the tail."""
        joined = self.joined
        if 0 < len(self._active) < self._world_size:
            if self._throw:
                raise EarlyTerminationError(
                    f"Rank {self.rank} exhausted all inputs."
                    if joined
                    else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                )
            if joined:
                self._serve()
                return False
            if not self._tail:
                self._begin_tail()
        if not self._active:
            self._end_tail()
        return not joined

    def _return_to_loop(self) -> None:
        """Finish a loop that this rank has left by `break`."""
        if self._left_loop:
            self._left_loop = False
            if self._beats_always and not self._stepped:
                raise JoinError(
                    f"Rank {self.rank} left its loop at step {self.step} after it had taken a batch and before the"
                    " model's forward, where the other ranks already count on it. Break at the end of a step."
                )
            self._leave()

    def _leave(self) -> None:
        self._meet(False, 0)
        self._go_on()


def _common_group(joinables: Sequence[Any]) -> Any:
    groups = [j.join_process_group for j in joinables if isinstance(j, Joinable)]
    if any(group != groups[0] for group in groups):
        raise ValueError("Using join context manager with multiple process groups")
    return groups[0] if groups else dist.group.WORLD
