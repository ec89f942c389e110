"""What many ranks say to all at a time, in every order in which messages may come."""

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.inside import Nodes, roll_calls_last

HOSTS = {
    "one host": "a" * 20,
    "hosts of eight": "aaaaaaaabbbbbbbbcccccccc",
    "hosts of one": "abcdefghij",
    "mixed": "abacabcc",
}
Program = Iterator[Callable[[], bool]]  # of one rank: what it waits for, again and again

done: list[int] = []  # ranks whose programs have come to their ends


def run(nodes: Nodes, programs: list[Program], pick: random.Random) -> None:
    """Go on with a message or a rank, whichever is drawn, until nothing is left to be done."""
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(programs)), lambda: True)
    while True:
        ready = [rank for rank, is_met in waits.items() if is_met()]
        if ready and pick.random() < 0.3:
            rank = pick.choice(ready)
            if (wait := next(programs[rank], None)) is None:
                del waits[rank]
            else:
                waits[rank] = wait
        elif not nodes.deliver(pick) and not ready:
            return


def everybody(hosts: str, seed: int, program: Callable[[Nodes, int, bool], Program], one_strays: bool = False) -> Nodes:
    """Have each rank run a program, one of them as a stray; nobody may be left waiting."""
    pick, nodes = random.Random(seed), Nodes(HOSTS[hosts])
    ranks = range(len(nodes.all))
    stray = pick.choice(ranks) if one_strays else None
    done.clear()
    run(nodes, [program(nodes, rank, rank == stray) for rank in ranks], pick)
    assert sorted(done) == [*ranks], "somebody waits for ever"
    return nodes


def calls(nodes: Nodes, rank: int, _: bool) -> Program:
    for _time in range(3):
        call, _until = nodes.all[rank].call_roll(0)
        assert call >= 1
        places = nodes.stream(rank).places
        yield lambda: all(places.get(other, (0, b""))[0] >= call for other in range(len(nodes.all)))  # noqa: B023
        assert {other: data for other, (_, data) in places.items()} == {
            other: str(other).encode() for other in range(len(nodes.all))
        }
    done.append(rank)


@pytest.mark.parametrize("seconds", [-1.0, 60.0], ids=["anew", "shared"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_all_call_the_roll_at_once(hosts: str, seconds: float) -> None:
    for seed in range(20):
        with roll_calls_last(seconds):
            nodes = everybody(hosts, seed, calls)
        called = max(nodes.stream(rank).calls for rank in range(len(nodes.all)))
        assert called == 1 if seconds > 0 else called >= 3
        assert set(nodes.sent.values()) == {1}
        for source, peer in {way[:2] for way in nodes.sent}:  # the call, which may cross itself, and an answer of each
            both = [way for way in nodes.sent if {*way[:2]} == {source, peer}]
            assert len(both) <= called * (len(nodes.all) + 2)


def loops(nodes: Nodes, rank: int, strays: bool) -> Program:
    """Meet at the end of three loops of a beat each; or wait at the third beat where others meet."""
    for loop in range(3):
        if strays and loop == 1:
            nodes.all[rank].come(0, loop + 2, 0)
            break
        have_met = nodes.meet(rank, loop)
        yield lambda: have_met() or nodes.stream(rank).came > loop + 1  # noqa: B023
        if not have_met():
            break
    done.append(rank)


@pytest.mark.parametrize("hosts", HOSTS)
def test_who_waits_for_all_hears_of_a_rank_that_goes_on(hosts: str) -> None:
    for seed in range(40):
        everybody(hosts, seed, loops, one_strays=True)


@pytest.mark.parametrize("hosts", HOSTS)
def test_all_who_wait_at_a_barrier_say_so_once(hosts: str) -> None:
    for seed in range(40):
        pick, nodes = random.Random(seed), Nodes(HOSTS[hosts])
        some = pick.sample(range(len(nodes.all)), 3)
        for rank in some:
            nodes.all[rank].come(0, 7, sum(1 << one for one in some))
            for _ in range(pick.randrange(8)):
                nodes.deliver(pick)
        while nodes.deliver(pick):
            pass
        assert set(nodes.sent.values()) == {1}
        # Whoever does not come to it may wait elsewhere.
        assert [nodes.stream(rank).came for rank in range(len(nodes.all))] == [
            7 if rank in some else 0 for rank in range(len(nodes.all))
        ]


def test_who_shares_a_call_waits_for_what_is_under_way() -> None:
    nodes = Nodes("aaa")
    call, until = nodes.all[1].call_roll(0)
    assert (call, until) == (1, 0.0)
    while nodes.deliver(random.Random(0)):
        pass
    begin = time.monotonic()
    call, until = nodes.all[2].call_roll(0)
    assert call == 1
    assert begin < until < begin + 0.2
    assert not nodes.deliver(random.Random(0))


def test_nobody_answers_a_call_over_a_stream_that_has_ended() -> None:
    nodes = Nodes("aaa")
    places, nodes.all[1].opened = nodes.stream(1).places, 1
    nodes.all[1].call_roll(0)
    while nodes.deliver(random.Random(0)):
        pass
    assert len(places) == 3
    nodes.all[1].end(0)
    call, _ = nodes.all[1].call_roll(0)
    assert not any(answered >= call for answered, _ in places.values())
