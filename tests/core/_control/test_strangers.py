"""Somebody else writes to the job's store: no code of theirs is run, and every rank ends with an error, soon."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.inside import channel_of, forget_failure, presence_store, who_answers
from tests.support.workers import Workers, connect
from torch_join import Join, JoinError
from torch_join._base.hyperparameters import Words
from torch_join._control.channel import Channel, Status
from torch_join._control.codec import encode
from torch_join._control.store_channel import StoreChannel
from torch_join.integration import open_channel, telling_failures

SOON = 12.0  # seconds


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def written(what: str, path: str) -> bytes:
    """Return what the stranger writes."""
    evil = pickle.dumps([Evil(path)] * 3)
    return {"pickle": evil, "garbage": b"\x00garbage", "wrong": encode({"a": [None, -1]}), "nothing": b""}[what]


def follow(channel: Channel, rank: int) -> None:
    if rank == 0:
        channel.beat()
    else:
        channel.follow(of=tuple[list[Any], tuple[int, ...]])


def gather(channel: Channel, rank: int) -> None:
    time.sleep(rank)  # whoever comes later writes over what the stranger wrote
    channel.gather([rank], of=list[int])


def ask(channel: Channel, rank: int) -> None:
    if rank == 0:
        channel.roll_call()
    channel.beat()


def read(channel: Channel, rank: int) -> None:
    if rank == 0:
        channel.beat()
    else:
        channel.read("sub/1/0", of=tuple[int, int])


# What a stranger overwrites before the ranks do something, and what they do.
KINDS: dict[str, tuple[str, Callable[[Channel, int], Any]]] = {
    "log": ("log/0", follow),
    "gather": ("gather/0/1", gather),
    "beat": ("go/0", lambda channel, rank: channel.beat(1) if rank else (time.sleep(0.5), channel.beat(1))),
    "notice": ("notices/0", lambda channel, rank: channel.beat(1, {"end": 1})),
    "number": ("sum/0", lambda channel, rank: channel.beat(1)),
    "counter": ("lossless/0", lambda channel, rank: channel.add("lossless/0", 1)),
    "failure": ("failure", lambda channel, rank: (_ for _ in ()).throw(channel.failure() or KeyError("none"))),
    "roll": ("roll", ask),
    "group": ("sub/1/0", read),
    "mark": ("sub/1/at/0", lambda channel, rank: channel.read("sub/1/at/0", of=int)),
    "testimony": ("gradients/0/0/1", lambda channel, rank: channel.read("gradients/0/0/1", of=list[tuple[int, str]])),
    "step": ("steps/0/2/1", lambda channel, rank: channel.read("steps/0/2/1", of=Words)),
}


def meet_a_stranger(rank: int, kind: str, what: str, path: str) -> tuple[str, float]:
    channel = open_channel(timeout=timedelta(seconds=20))
    assert isinstance(channel, StoreChannel)
    channel.status = lambda: Status([])
    key, act = KINDS[kind]
    dist.barrier()
    if rank == 0:
        presence_store(channel).set(key, written(what, path))
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(JoinError) as error, telling_failures(channel):
        act(channel, rank)
        for _ in range(50):  # the others hear of it in what they do next
            time.sleep(0.1)
            channel.beat()
    seconds = time.monotonic() - start
    channel.leave()
    time.sleep(0.5)
    return str(error.value), seconds


@pytest.mark.parametrize("what", ["pickle", "garbage", "wrong"])
@pytest.mark.parametrize("kind", [*KINDS])
def test_every_key_of_a_channel(workers: Workers, tmp_path: Path, kind: str, what: str) -> None:
    outcomes = workers.outcomes(2, meet_a_stranger, kind, what, str(tmp_path / "run"), links=False)
    assert not (tmp_path / "run").exists()
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        text, seconds = outcome.value
        assert "is not a message of its ranks" in text, outcomes
        assert "let nobody but the job's own machines reach its port" in text
        assert seconds < SOON, outcomes


def train(rank: int, lengths: tuple[int, ...], heartbeat: bool, keys: list[str], what: str, path: str) -> None:
    connect()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=6))
    with Join([model, optimizer], heartbeat=heartbeat, timeout=timedelta(seconds=20)) as join:
        for step, x in enumerate(join.batches([torch.ones(2, 3)] * lengths[rank])):
            if step == 1 and rank == 0:
                for key in keys:
                    presence_store(channel_of(join)).set(key.format(pair=pair.group_name), written(what, path))
            if step == 1:
                dist.barrier()
            model(x).sum().backward()
            if rank < 2:
                dist.all_reduce(torch.ones(1), group=pair)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 2 and step == 4:
                time.sleep(0.5)  # so that rank 1 looks for the word of this one before that is written


ATTACKS = {
    "log": (["log/3"], False),
    "beats": (["go/4", "sum/0", "sum/1"], True),
    "agreement": ([f"said/{number}/2/{step}" for number in range(9) for step in range(9)], False),
    "last words": ([f"said/{number}/last/{left}" for number in range(9) for left in range(3)], False),
    "groups": ([f"sub/{{pair}}/{number}" for number in range(9)], False),
    "everything": (["log/2", "gather/1/0", "go/3", "notices/3", "failure", "roll", "here/0"], True),
}


@pytest.mark.parametrize("what", ["pickle", "wrong"])
@pytest.mark.parametrize("name", [*ATTACKS])
def test_every_key_of_a_loop(workers: Workers, tmp_path: Path, name: str, what: str) -> None:
    keys, heartbeat = ATTACKS[name]
    arguments = ((2, 5, 6), heartbeat, keys, what, str(tmp_path / "run"))
    outcomes = workers.outcomes(3, train, *arguments, timeout=6.0, links=False)
    assert not (tmp_path / "run").exists()
    assert any("is not a message of its ranks" in outcome.error for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert "Error" in outcome.error, outcomes
        assert outcome.seconds < 20, outcomes


def outlive(rank: int, messages: list[str]) -> tuple[list[bool], list[int]]:
    """Have a stranger write failures; return whether the answering thread lives, and who answers after them."""
    channel = open_channel()
    assert isinstance(channel, StoreChannel)
    store, alive = presence_store(channel), []
    failed = [False]

    def status() -> Status:
        if not failed[0]:
            failed[0] = True
            raise RuntimeError("dictionary changed size during iteration")
        return Status([])

    channel.status = status
    for message in messages:
        dist.barrier()
        if rank == 0:
            store.set("failure", message)
            store.add("roll", 1)
        time.sleep(1.0)
        alive.append(any(thread.name.endswith("(_answer)") for thread in threading.enumerate()))
        forget_failure(channel)
    answers = who_answers(channel)
    dist.barrier()
    channel.leave()
    return alive, answers


def test_the_answering_thread_outlives_what_a_stranger_writes(workers: Workers) -> None:
    messages = ['{"scalar":["uint8",1,"hpu"]}', '{"size":[100000000000000000000]}', "[" * 400 + "]" * 400]
    for alive, answers in workers.run(2, outlive, messages, links=False):
        assert alive == [True] * 3
        assert sorted(answers) == [0, 1]


def an_answer(rank: int, what: str, path: str) -> str:
    channel = open_channel()
    assert isinstance(channel, StoreChannel)
    dist.barrier()
    store = presence_store(channel)
    text = ""
    if rank == 0:
        end = time.monotonic() + 20
        while not text and time.monotonic() < end:  # until it comes between the answer and its reader
            store.set("here/1", written(what, path))
            try:
                channel.roll_call()
            except JoinError as error:
                text = str(error)
    with suppress(JoinError):
        channel.gather(text)
    channel.leave()
    return text


@pytest.mark.parametrize("what", ["pickle", "garbage", "wrong"])
def test_an_answer_to_a_roll_call(workers: Workers, tmp_path: Path, what: str) -> None:
    text = workers.run(2, an_answer, what, str(tmp_path / "run"), links=False)[0]
    assert not (tmp_path / "run").exists()
    assert "an answer to a roll call is not a message of its ranks" in text
