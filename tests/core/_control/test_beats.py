"""Meetings over a store, in threads that take turns at random."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.inside import FULL, FULL_PLACE, store_of
from torch_join._control.beats import Beats
from torch_join._control.channel import Beat

positions: dict[int, Any] = {}  # by loop, of the rank that left last


class Meeting:
    """The beats of several ranks over one store."""

    def __init__(self, world_size: int) -> None:
        self.store: Any = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=10))
        self.deleted: list[str] = []
        self.ranks = [Beats(self.store, r, world_size, self.store.get, self.delete) for r in range(world_size)]

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.store.delete_key(key)


ALL = (0, 1)


def said_by(rank: int, step: int) -> tuple[int, dict[str, Any] | None]:
    return (rank + 1) * step, {"at": step} if (step + rank) % 5 == 0 else None


def attend(beats: Beats, rank: int, lengths: list[int], loops: int, seed: int) -> list[Beat]:
    """Come to as many beats as this rank has inputs, then say that it leaves, and skip those of the others."""
    wait = random.Random(seed)
    heard = []
    for _ in range(loops):
        for step in range(lengths[rank] + 1):
            participants = [r for r, length in enumerate(lengths) if length >= step]
            leaves = step == lengths[rank]
            waits = leaves or wait.random() < 0.3
            count, notice = said_by(rank, step)
            beats.say(count, {} if leaves else notice, participants, waits)
            for _ in range(wait.randrange(3)):
                time.sleep(0.0002)
            heard.append(beats.hear())
        meet_where_the_last_one_is(beats, rank, lengths)
    return heard


def meet_where_the_last_one_is(beats: Beats, rank: int, lengths: list[int]) -> None:
    """Take up the beats where the rank that left last is."""
    store = store_of(beats)
    last = max(range(len(lengths)), key=lambda r: lengths[r])
    loop = store.add(f"loop/{rank}", 1)
    if rank == last:
        positions[loop] = deepcopy(beats.position)
        store.set(f"position/{loop}", "there")
    else:
        store.get(f"position/{loop}")
        beats.skip_to(deepcopy(positions[loop]))
    store.add(f"met/{loop}", 1)
    deadline = time.monotonic() + 10
    while store.add(f"met/{loop}", 0) < len(lengths):
        assert time.monotonic() < deadline  # another thread has failed
        time.sleep(0.0005)
    beats.all_have_met()


@pytest.mark.parametrize("full", [FULL, 40])
@pytest.mark.parametrize("lengths", [[30, 60], [60, 0, 60], [7, 50, 50, 20], [9, 9, 9]])
@pytest.mark.parametrize("seed", range(3))
def test_all_hear_the_same(lengths: list[int], full: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FULL_PLACE, full)
    positions.clear()
    meeting = Meeting(len(lengths))
    with ThreadPoolExecutor(len(lengths)) as pool:
        futures = [
            pool.submit(attend, beats, rank, lengths, 3, seed * 100 + rank) for rank, beats in enumerate(meeting.ranks)
        ]
        heard = [future.result(timeout=30) for future in futures]
    for rank, beats in enumerate(heard):
        expected = []
        for step in range(lengths[rank] + 1):
            said = {r: said_by(r, step) for r, length in enumerate(lengths) if length >= step}
            notices = {r: {} if step == lengths[r] else notice for r, (_, notice) in said.items()}
            total = sum(count for count, _ in said.values())
            expected.append(Beat(total, {r: notice for r, notice in notices.items() if notice is not None}))
        assert beats == 3 * expected
    for beats in meeting.ranks:
        beats.close()
    ours = [key for key in ("sum/0", "sum/1") if meeting.store.check([key])]
    assert not ours
    assert not [step for step in range(400) if any(meeting.store.check([f"{k}/{step}"]) for k in ("go", "notices"))]


def test_who_need_not_wait_finds_all_there_with_one_more_look() -> None:
    meeting = Meeting(3)
    first, second, _ = meeting.ranks
    for _ in range(4):
        first.say(1, None, ALL, waits=False)
        second.say(2, None, ALL, waits=False)
        assert second.hear() == first.hear() == Beat(3)
    assert meeting.store.num_keys() == 2  # the numbers


def test_who_looks_too_early_waits() -> None:
    meeting = Meeting(3)
    first, second, _ = meeting.ranks
    with ThreadPoolExecutor(1) as pool:
        for step in range(4):
            first.say(1, None, ALL, waits=False)
            early = pool.submit(first.hear)
            time.sleep(0.05)
            assert not early.done()
            second.say(2, {"x": step}, ALL, waits=False)
            assert second.hear() == early.result(timeout=10) == Beat(3, {1: {"x": step}})


def test_a_rank_may_come_to_the_next_beat_before_another_has_heard_the_last() -> None:
    meeting = Meeting(3)
    first, second, _ = meeting.ranks
    first.say(1, None, ALL, waits=False)
    second.say(2, None, ALL, waits=False)
    assert second.hear() == Beat(3)
    second.say(20, {"x": 0}, ALL, waits=False)
    assert first.hear() == Beat(3)
    first.say(10, None, ALL, waits=True)
    assert first.hear() == second.hear() == Beat(30, {1: {"x": 0}})


def test_one_rank_alone_needs_no_store() -> None:
    meeting = Meeting(2)
    meeting.ranks[0].say(7, {"x": 0}, (0,), waits=True)
    assert meeting.ranks[0].hear() == Beat(7, {0: {"x": 0}})
    assert meeting.store.num_keys() == 0


def test_what_another_rank_may_not_have_read_is_kept_after_a_skip() -> None:
    meeting = Meeting(3)
    stays, slow, joins = meeting.ranks
    for beats, notice in ((stays, None), (slow, {}), (joins, {})):
        beats.say(0, notice, range(3), True)
    joins.hear()
    stays.hear()
    stays.say(0, {}, (0,), True)  # leaves alone
    stays.hear()
    joins.skip_to(deepcopy(stays.position))
    joins.say(0, None, range(3), True)
    assert slow.hear() == Beat(0, {1: {}, 2: {}})
