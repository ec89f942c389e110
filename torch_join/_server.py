"""What active ranks announce in the tail of a loop, and how a joined rank serves them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torch_join import _compat_c10d
from torch_join._channel import Channel
from torch_join._errors import JoinError, JoinValueError, UnsupportedError
from torch_join._handover import hand_over
from torch_join._neutral import mirror
from torch_join._tap import Call, CollectiveTap
from torch_join._weighting import Weighting, loss_factor
from torch_join.joinables import ModelPart, Part, holds_metrics

_END, _COLLECTIVE, _TAIL = "end", "collective", "tail"


class Server:
    """The tail of a loop, on an active rank and on one that has joined.

    Args:
        group: The process group.
        objects: Everything that was given to `Join`.
        weighting: How the gradients of the active ranks are combined.
    """

    def __init__(self, group: Any, objects: list[Any], weighting: Weighting) -> None:
        self.weighting = weighting
        self.rank = dist.get_rank(group)
        self.serving = False
        self.group = group
        self._objects = objects
        self._members = dist.get_process_group_ranks(group)
        self._world_size = len(self._members)
        self._parts: list[Part] = []
        self._channel = Channel()
        self._tap = CollectiveTap(self._announce_collective, self._has_joined)
        self._active: tuple[int, ...] = tuple(range(self._world_size))
        self._leader = 0
        self._tail = False
        self._samples = self._total_samples = 0
        self._last_joiner = True

    # ------------------------------------------------------------ what the parts see

    @property
    def joined_ranks(self) -> list[int]:
        """The ranks that have run out of inputs."""
        return [rank for rank in range(self._world_size) if rank not in self._active]

    @property
    def in_tail(self) -> bool:
        """Whether this rank is active and another one has joined."""
        return self._tail and not self.serving

    @property
    def leader(self) -> int:
        """The lowest active rank, which speaks for all; once all have joined, the one that was it last."""
        return self._leader

    @property
    def loss_factor(self) -> float:
        """What to multiply this rank's gradients with, as DDP divides their sum by the world size."""
        return loss_factor(self.weighting, self._world_size, len(self._active), self._samples, self._total_samples)

    def announce(self, index: int, kind: str, payload: Any = None) -> None:
        """Tell the joined ranks, if there are any, what comes next."""
        if self.in_tail:
            self._channel.announce((index, kind, payload, self._active), leads=self.rank == self._leader)

    @contextmanager
    def own_collectives(self) -> Iterator[None]:
        """Put around collectives that joined ranks know of without the tap."""
        with self._tap.ignoring():
            yield

    def run_hook(self, main_hook: Callable[[], None]) -> None:
        """Run a main hook; each collective that it issues stands for one that the active ranks announce."""
        self._tap = CollectiveTap(self._expect_collective, None)
        self._tap.install()
        try:
            main_hook()
        finally:
            self._tap.remove()
            self._tap = CollectiveTap(self._announce_collective, self._has_joined)

    def _set_active(self, active: tuple[int, ...]) -> None:
        self._active = active
        if active:
            self._leader = active[0]

    # ------------------------------------------------------------ the tail

    def _begin_tail(self) -> None:
        self._tail = True
        counts = [part.synced for part in self._parts if isinstance(part, ModelPart)]
        self.announce(-1, _TAIL, counts)
        for part in self._parts:
            part.enter_tail()
        self._tap.install()

    def _end_tail(self) -> None:
        """All ranks have joined; if some came earlier, give all of them the last one's state."""
        self._last_joiner = True
        if self._tail:
            words = [part.last_words() for part in self._parts]
            self._channel.announce((-1, _END, (words, self._channel.beats), ()), leads=self.rank == self._leader)
            self._leave_tail()
            self._hand_over(words)
        self._active = tuple(range(self._world_size))

    def _leave_tail(self) -> None:
        if self._tail:
            self._tail = False
            self._tap.remove()
            for part in self._parts:
                part.leave_tail()

    def _hand_over(self, words: list[Any]) -> None:
        for part, its_words in zip(self._parts, words, strict=True):
            part.close(its_words, self._leader)
        # A metric's state is each rank's own share.
        states = [thing for thing in self._objects if _is_stateful(thing) and not holds_metrics(thing)]
        if states:
            hand_over(states, self._leader, self._channel, self.group)

    def _serve(self) -> None:
        """Do what the active ranks announce, with nothing, until they have joined too."""
        self._leave_tail()
        self.serving = True
        try:
            while True:
                index, kind, payload, active = self._channel.follow()
                self._set_active(tuple(active))
                if kind == _END:
                    break
                self._answer(index, kind, payload)
        finally:
            self.serving = False
        words, beats = payload
        self._last_joiner = False
        self._channel.skip_to(beats)
        self._hand_over(words)
        self._active = tuple(range(self._world_size))

    def _answer(self, index: int, kind: str, payload: Any) -> None:
        if kind == _COLLECTIVE:
            mirror(payload)
        elif kind == _TAIL:
            self._compare_counts(payload)
        else:
            self._parts[index].answer(kind, payload)
            if kind == "backward" and self.rank == self.joined_ranks[0]:
                self._channel.forget()  # it was synced: all joined ranks have read up to here

    def _announce_collective(self, call: Call) -> None:
        group = _compat_c10d.group_named(call.group)
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        if self._members[self._leader] not in ranks:
            raise UnsupportedError(
                f"{call.operation} on a process group of ranks {ranks}, of which some have joined: only the lowest"
                f" active rank, here {self._members[self._leader]}, can tell them, and it is not in the group. Use a"
                " group of all ranks, or one that every active rank is in."
            )
        self.announce(-1, _COLLECTIVE, call)

    def _expect_collective(self, call: Call) -> None:
        _, kind, payload, _ = self._channel.follow()
        if kind != _COLLECTIVE or payload.operation != call.operation:
            found = payload.operation if kind == _COLLECTIVE else kind
            raise JoinError(
                f"A main hook on rank {self.rank} issued {call.operation}, where the active ranks announced {found}."
                " A main hook must issue the collectives of its joinable's step, in the same order."
            )

    def _has_joined(self, rank: int) -> bool:
        return rank in self._members and self._members.index(rank) not in self._active

    # ------------------------------------------------------------ checks

    def _compare_lists(self) -> None:
        mine = [type(thing).__name__ for thing in self._objects]
        everyone = self._channel.gather(mine)
        if any(names != everyone[0] for names in everyone):
            given = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(everyone))
            raise JoinValueError(f"All ranks must give Join the same joinables in the same order, but gave {given}.")

    def _compare_counts(self, theirs: list[int]) -> None:
        mine = [part.synced for part in self._parts if isinstance(part, ModelPart)]
        if mine != theirs:
            raise JoinError(
                f"Rank {self.rank} has run {mine} synced backwards (by model) before it joined, and the active ranks"
                f" {theirs}. A usual cause is to sync on a rank's own last batch (`if i + 1 == len(loader)`), which"
                " ranks reach at different steps: sync at steps that are the same on all ranks."
            )


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
