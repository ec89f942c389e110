"""Who is active at which step of a plain loop."""

from typing import Any

from torch_join._base import compat as _compat
from torch_join._base.errors import EarlyTerminationError, JoinValueError, UnsupportedError
from torch_join._base.hyperparameters import Steps, Words
from torch_join._base.weighting import Weighting
from torch_join._tail.reader import Reader
from torch_join._tail.server import Server
from torch_join.joinables import ungiven


class Meetings(Server):
    """Finds out at each step, from certain lengths or by a meeting, who has an input.

    Args:
        group: The process group.
        objects: Everything that was given to `Join`.
        weighting: How the gradients of the active ranks are combined.
        throws: Whether to raise when the first rank runs out of inputs while others have some.
        may_break: Whether a rank may leave a loop in any step. The meeting is then put off until a rank
            does something in its step that others take part in, so that it may break before that.
    """

    _in_loop: bool  # over `batches`
    _asked: bool  # for a batch of the last one; else this rank is elsewhere in its own code
    _loop_done: bool  # the last that happened was such a loop

    def __init__(self, group: Any, objects: list[Any], weighting: Weighting, throws: bool, may_break: bool) -> None:
        self._objects = objects
        super().__init__(group, objects, weighting)
        self._throws = throws
        self.may_break = self.may_break or may_break

    def _reset(self) -> None:
        super()._reset()
        self._awaited: tuple[int, bool] | None = None  # what this rank says in a meeting that has been put off
        self._at_last = False
        self._steps = Steps(self._objects)
        self._posted: list[str] = []  # keys, for ranks that join
        self.step = 0

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of inputs."""
        self._arrive()
        return self.rank not in self._active

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that have an input at the current step."""
        self._arrive()
        return self._active

    @property
    def at_last_step(self) -> bool:
        """Whether no rank has an input after this step, as far as the loaders can tell."""
        self._arrive()
        return self._at_last

    def _next_step(self, reader: Reader[Any], certain: list[int] | None) -> bool:
        """Find out who is active at this step; serve if this rank is not. Return whether it is."""
        self._steps.begin()
        return self._find_out(reader, certain)

    def _find_out(self, reader: Reader[Any], certain: list[int] | None) -> bool:
        samples = reader.samples if self.weighting == "samples" else 0
        if self.may_break:
            self._arrive()
            if reader.has_next():
                self._awaited = samples, reader.at_last
                for model in () if self._tail else self._models():
                    model.begin_step()
                return True
            self._meet(False, 0)
        elif certain is None:
            self._meet(reader.has_next(), samples, reader.at_last)
        else:
            if not (self._throws and min(certain) <= self.step):  # else all know, and throw
                self._correct(reader, certain)
            self._at_last = self.step + 1 >= max(certain)
            self._set_active(tuple(r for r, length in enumerate(certain) if length > self.step))
        return self._go_on()

    def _correct(self, reader: Reader[Any], lengths: list[int]) -> None:
        """Tell the others in time if this loader's length proves wrong, and hear of theirs."""
        real = reader.length_if_known(self.step)
        claimed = lengths[self.rank]
        if (real is None and self.step + reader.sight >= claimed) or (real is not None and real > claimed):
            raise JoinValueError(
                f"The loader of rank {self.rank} said its length was {claimed} and goes on after that, which the other"
                " ranks cannot know in time. Mend its __len__, or use Join(..., heartbeat=True)."
            )
        if not reader.corrects:
            if real is not None and real != claimed:
                raise JoinValueError(
                    f"The loader of rank {self.rank} said its length was {claimed} and ended after {real} batches,"
                    " which the other ranks cannot know in time. Mend its __len__, or use heartbeat=True."
                )
            return
        if real is not None and real != claimed:
            self._channel.correct(real)
            lengths[self.rank] = real
        # Who ends early has told of it before its last step but one began, so that every other look is enough.
        for rank, length in self._channel.corrections().items() if self.step % 2 else ():
            lengths[rank] = length

    def _arrive(self, waits: bool = True) -> None:
        self._return_to_loop()
        if self._awaited is None:
            return
        with self._telling():
            if not self._has_said:
                self._say(True, *self._awaited, waits)
            self._has_said = True
            if waits:
                self._awaited, self._has_said = None, False
                self._hear()
                self._go_on()
                for model in () if self._tail else self._models():
                    model.silent = 0

    @property
    def _at_top(self) -> bool:
        return self._in_loop and self._asked and not self.may_break

    def _end_even(self) -> None:
        if self._in_loop or not self._loop_done:
            self._audit.even(self._channel, self._has_synced, self._left is not None)

    def _meet(self, has_input: bool, samples: int, at_last: bool = False) -> None:
        """Say whether this rank has an input, and whether that is its last; the active ranks meet."""
        self._say(has_input, samples, at_last)
        self._hear()

    def _say(self, has_input: bool, samples: int, at_last: bool, waits: bool = True) -> None:
        notice = {} if not has_input else {"last": True} if at_last else None
        self._channel.say(samples, notice, len(self._active), waits)
        self._samples = samples

    def _hear(self) -> None:
        beat = self._channel.hear()
        self._total_samples = beat.total
        self._set_active(tuple(rank for rank in self._active if beat.notices.get(rank) != {}))
        self._at_last = bool(self._active) and all(rank in beat.notices for rank in self._active)

    def _go_on(self) -> bool:
        """Do what follows from who is active: throw, serve, begin or end the tail."""
        joined = self.joined
        if self._active and len(self._before) == self._world_size:
            # All ranks come here. In its next forward DDP would wait for a rank that leaves that out (a skipped batch)
            # and waits itself, at its next meeting, for those who are in there.
            for model in self._models():
                if not _compat.has_rebuilt_buckets(model.ddp):
                    with self.own_collectives():
                        if _compat.rebuild_buckets(model.ddp):
                            model.rebind()
        if 0 < len(self._active) < self._world_size:
            if self._throws:
                raise EarlyTerminationError(
                    f"Rank {self.rank} exhausted all inputs."
                    if joined
                    else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                )
            if self._active != self._before:
                self._compare_steps()
            if joined:
                self._serve()
                return False
            if not self._tail:
                self._begin_tail()
            self._agreement.compare(self.rank, self._active)
        if not self._active:
            self._end_tail()
        return not joined

    def _check_backward(self, group: list[int], is_ddps: bool) -> None:
        if not is_ddps and self.weighting == "samples" and not self._tail:
            raise UnsupportedError(
                "A collective in backward (of a loss over all ranks' outputs, for example) under weighting='samples':"
                " each rank's gradients are weighted by its number of samples where they reach the parameters, and"
                " by then those of other ranks are mixed into them. Use weighting='world' with a loss that weighs"
                " samples itself, or a collective on detached tensors in the forward pass."
            )
        joined = [rank for rank in group if rank in self._members and self._members.index(rank) in self.joined_ranks]
        if is_ddps and self._tail and joined and not any(model.in_backward for model in self._models()):
            raise ungiven(joined)

    def _compare_steps(self) -> None:
        """Compare, where some rank joins, whether the optimizers of those that came so far went together."""
        # Between two departures nothing may be announced.
        place = f"steps/{self._channel.records}/{len(self._active)}"
        words = self._steps.words(self.may_break)
        self._channel.post(f"{place}/{self.rank}", words)
        self._posted.append(f"{place}/{self.rank}")
        others = {rank: self._channel.read(f"{place}/{rank}", of=Words) for rank in self._before if rank != self.rank}
        self._steps.compare({self.rank: words, **others})

    def _hand_over(self, words: list[Any]) -> None:
        while self._posted:  # all have come to the end of the tail, and so have read it
            self._channel.delete(self._posted.pop())
        super()._hand_over(words)

    def _return_to_loop(self) -> None:
        """Finish a loop that this rank has left, before it does anything else with others."""

    def _leave(self) -> None:
        if self._has_said:
            self._arrive()
        self._awaited = None
        self._meet(False, 0)
        self._go_on()
