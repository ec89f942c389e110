"""Attendance, agreement and tails of ranks that are threads."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from tests.core import threads
from torch_join import EarlyTerminationError, JoinError, PeerFailedError
from torch_join._control.channel import Channel
from torch_join._participants.participant import Participant
from torch_join._schedule.active_ranks import ExchangedActiveRanks
from torch_join._tail.agreement import Agreement
from torch_join._tail.records import END


def attend(channel: Channel, lengths: tuple[int, ...], throws: bool = False) -> list[tuple[tuple[int, ...], bool]]:
    """Return, by step, who is active and whether it is the last step, as this rank knows while it is in it."""
    active_ranks, seen = ExchangedActiveRanks(channel, throws, first_step=-1), []
    for step in range(max(lengths)):
        ends = lengths[channel.rank] <= step + 1
        active_ranks.arrive(1, {"end": lengths[channel.rank]} if ends else None, waits=True)
        active_ranks.meet()
        seen.append((active_ranks.active_ranks, active_ranks.is_last_step))
    return seen


def end_late(channel: Channel) -> list[int]:
    """Leave a loop before ranks 1 and 2, which are slow at its end, and wait for them at the begin of the next one."""
    channel.barrier()
    if channel.rank > 0:
        for _ in range(3):
            if channel.rank == 2:  # so that rank 1 waits for it, and tells of that
                time.sleep(0.6)
            channel.arrive(ranks=[1, 2])
            channel.wait()
    return channel.gather(channel.rank)


def test_ranks_that_were_active_longer_may_be_late_for_the_next_loop() -> None:
    assert threads.run(3, end_late) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("lengths", [(3, 5, 2), (4, 4), (1, 0, 6, 2), (2, 9), (5, 1, 3) * 4])
def test_all_ranks_know_who_is_active(lengths: tuple[int, ...]) -> None:
    expected = []
    for step in range(max(lengths)):
        active = tuple(rank for rank, length in enumerate(lengths) if length > step)
        expected.append((active, step + 1 == max(lengths)))
    assert threads.run(len(lengths), attend, lengths) == [expected] * len(lengths)


def test_all_ranks_throw_where_the_first_one_joins() -> None:
    with pytest.raises(EarlyTerminationError):
        threads.run(3, attend, (2, 4, 4), True)


def agree(channel: Channel, odd: int, at: int, leaves: int) -> None:
    """Announce the same in ten steps, but for one rank in one step; a rank leaves after a step."""
    agreement, active = Agreement(channel), (0, 1, 2)
    for step in range(10):
        agreement.compare(channel.rank, active)
        what = "backward" if channel.rank == odd and step == at else "forward"
        agreement.note((0, what, [step]), leads=channel.rank == 0)
        channel.barrier()
        if step == leaves:
            agreement.note_change(channel.rank, active, (0, 2))
            return


@pytest.mark.parametrize(("odd", "at", "leaves"), [(1, 2, 9), (2, 0, 0), (0, 9, 9), (1, 5, 6)])
def test_ranks_that_announce_different_things_are_told(odd: int, at: int, leaves: int) -> None:
    with pytest.raises((JoinError, PeerFailedError), match="do different things in the tail"):
        threads.run(3, agree, odd, at, leaves)


def test_ranks_that_announce_the_same_agree() -> None:
    threads.run(3, agree, -1, 0, 9)


class Numbers(Participant):
    """Notes what it answers, and what it closes with."""

    kinds: ClassVar[dict[str, Any]] = {"number": int}
    closing = int

    def __init__(self, driver: Any) -> None:
        super().__init__(driver, 0)
        self.found: list[int] = []

    def mirror(self, kind: str, payload: Any) -> None:
        self.found.append(payload)

    def closing_message(self) -> int:
        return len(self.found)


class Driver:
    """What a part asks for."""

    def __init__(self, channel: Channel) -> None:
        self.tail_log = threads.server_over(channel)
        self.members = self.tail_log.members


@contextmanager
def tail(channel: Channel) -> Iterator[Numbers]:
    driver = Driver(channel)
    part = Numbers(driver)
    driver.tail_log.participants = [part]  # type: ignore[list-item]
    try:
        yield part
    finally:
        driver.tail_log.participants = []
        driver.tail_log.close()


def serve_a_tail(channel: Channel, numbers: int, fails: bool) -> list[int]:
    """The last rank announces numbers, and the others, which have joined, follow."""
    last = channel.world_size - 1
    with tail(channel) as part:
        tail_log = part.tail_log
        tail_log.members.change((last,))
        if channel.rank == last:
            tail_log.begin_tail()
            for number in range(numbers):
                part.announce("number", number)
            if fails:
                raise KeyError("a hole")
            tail_log.end_tail()
            return [*range(numbers)]
        tail_log.join()
        words, leader, in_pieces, still = tail_log.follow(END)
        assert (words, leader, in_pieces, still) == ([0], last, False, False)
        return part.found


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_joined_ranks_follow_in_order(world_size: int) -> None:
    assert threads.run(world_size, serve_a_tail, 50, False) == [[*range(50)]] * world_size


def test_a_failure_ends_the_tail_of_those_who_follow() -> None:
    with pytest.raises((KeyError, PeerFailedError), match="a hole"):
        threads.run(3, serve_a_tail, 5, True)
