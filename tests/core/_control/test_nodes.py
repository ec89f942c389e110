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


def everybody(hosts: str, seed: int, program: Callable[[Nodes, int], Program]) -> Nodes:
    """Have each rank run a program; nobody may be left waiting."""
    pick, nodes = random.Random(seed), Nodes(HOSTS[hosts])
    ranks = range(len(nodes.all))
    done.clear()
    run(nodes, [program(nodes, rank) for rank in ranks], pick)
    assert sorted(done) == [*ranks], "somebody waits for ever"
    return nodes


def calls(nodes: Nodes, rank: int) -> Program:
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
