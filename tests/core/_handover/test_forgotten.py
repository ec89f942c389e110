"""What follows a given model, and was not given, is named; what the loop only reads, or keeps for itself, is not."""

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from tests.support.warned import warned
from tests.support.workers import Workers
from torch_join import Join


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@torch.no_grad()
def follow(averages: Any, model: nn.Module) -> None:
    for average, p in zip(averages, model.parameters(), strict=True):
        average.lerp_(p, 0.2)


class Shadow:
    """An average of the parameters in a dictionary, as many write it: each entry is another tensor in each step."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name] = 0.8 * self.shadow[name] + 0.2 * p.detach()

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shadow = dict(state)


class Around(nn.Module):
    """A model, perhaps wrapped, and its average, in one module that nobody was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.average = copy.deepcopy(model)


class Trainer:
    """Holds what it trains in attributes."""

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.averages = {"slow": copy.deepcopy(ddp.module).requires_grad_(False)}

    def fit(self, join: Join, batches: Any, step: Callable[[Tensor], None]) -> None:
        for x in join.batches(batches):
            step(x)
            follow(self.averages["slow"].parameters(), self.ddp.module)


def trained(rank: int, kind: str, lengths: list[int], options: dict[str, Any]) -> list[str]:
    with warned("differ") as said:
        train(kind, [torch.randn(3, 4) for _ in range(lengths[rank])], options)
    return said


def train(kind: str, batches: list[Tensor], options: dict[str, Any]) -> None:
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = SGD(ddp.parameters(), 0.1)
    given: list[Any] = [ddp, optimizer]
    teacher = copy.deepcopy(model)  # with gradients, as some forget to tell it that it has none
    ended = None
    if kind == "an AveragedModel":
        average = AveragedModel(model)
        update: Any = lambda: average.update_parameters(model)  # noqa: E731
    elif kind in ("an object", "given, and in an object"):
        shadow = Shadow(model)
        update = lambda: shadow.update(model)  # noqa: E731
        given += [shadow] * (kind != "an object")
    elif kind == "in a module around both":
        around = Around(model)
        update = lambda: follow(around.average.parameters(), model)  # noqa: E731
    elif kind == "a target network of a part":
        target = nn.Sequential(*copy.deepcopy(model)[:2])
        update = lambda: follow(target.parameters(), model[:2])  # noqa: E731
    elif kind == "a target network, copied at times":
        target = copy.deepcopy(model)
        update = lambda: target.load_state_dict(model.state_dict())  # noqa: E731
    elif kind == "the best so far":
        best = copy.deepcopy(model)
        update = lambda: None  # noqa: E731
    elif kind == "a rank's own":
        own = nn.Linear(4, 4)
        rate = SGD(own.parameters(), 0.1)
        update = rate.step
    elif kind == "an evaluation's BatchNorm":
        reference = copy.deepcopy(model)
        update = lambda: reference(torch.ones(3, 4))  # noqa: E731
    else:
        update = lambda: follow(teacher.parameters(), model) if kind == "a teacher" else None  # noqa: E731

    def step(x: Tensor) -> None:
        nonlocal ended
        optimizer.zero_grad()
        (ddp(x) - teacher(x) - 1).square().mean().backward()
        if kind == "a rank's own":
            own(x).square().mean().backward()
        optimizer.step()
        update()
        ended = x

    with Join(given, **options) as join:
        if kind == "in a trainer":
            Trainer(ddp).fit(join, batches, step)
            return
        for x in batches if options.get("audit") is True else join.batches(batches):  # a plain `for`
            step(x)
            if kind == "the best so far":
                best = copy.deepcopy(model)  # noqa: F841
    inner = ddp.module  # noqa: F841
    head = model[2]  # noqa: F841


FORGOTTEN = {
    "a teacher": r"teacher \(Sequential\) in train\(\), which was not given to Join: 0.weight, 1.weight, 1.bias",
    "an AveragedModel": r"average \(AveragedModel\) in train\(\), which was not",
    "an object": r"shadow\.shadow in train\(\), which was not given to Join: 0.weight",
    "in a module around both": r"around \(Around\) in train\(\), which was not given to Join: average.0.weight",
    "in a trainer": r"self\.averages\['slow'\] \(Sequential\) in fit\(\), which was not",
    "a target network of a part": r"target \(Sequential\) in train\(\), which was not",
    "a target network, copied at times": r"target \(Sequential\) in train\(\), which was not",
}


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_what_follows_a_model_and_was_not_given_is_named(workers: Workers, kind: str) -> None:
    said, nothing = workers.run(2, trained, kind, [1, 3], {})
    assert nothing == []  # one rank speaks for all
    assert len(said) == 1
    assert re.search(FORGOTTEN[kind], said[0]), said[0]
    assert "pass it to Join" in said[0]


@pytest.mark.parametrize("options", [{"may_break": True}, {"audit": True}, {"weighting": "samples"}], ids=str)
def test_it_is_named_in_each_kind_of_loop(workers: Workers, options: dict[str, Any]) -> None:
    said, *_ = workers.run(3, trained, "a teacher", [2, 0, 3], options)
    assert [FORGOTTEN["a teacher"][:7] in text for text in said] == [True]


def keep_on_one(rank: int, kind: str, keeper: int, lengths: list[int], options: dict[str, Any]) -> list[str]:
    """Keep on one rank alone what other ranks do not have."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = SGD(ddp.parameters(), 0.1)
    average: Any = None
    if rank == keeper:
        average = Shadow(model) if kind == "an object" else copy.deepcopy(model)
        if kind == "stream, a dict":
            average = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warned("average") as said, Join([ddp, optimizer], **options) as join:
        batches: Any = [torch.randn(3, 4) for _ in range(lengths[rank])]
        streams = kind.startswith("stream")
        for x in batches if kind == "plain for" else join.batches(iter(batches) if streams else batches):
            ddp(x).square().mean().backward()
            if kind == "windows" and join.step % 2 == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if rank == keeper:
                if kind == "an object":
                    average.update(model)
                elif kind in ("a model", "windows", "stream", "plain for") or (
                    kind == "at times" and join.step % 3 == 1
                ):
                    follow(average.parameters(), model)
                elif kind == "stream, a dict":
                    follow(average.values(), model)
                elif kind == "the best so far":
                    average = copy.deepcopy(model)
    return said


@pytest.mark.parametrize(
    ("kind", "keeper", "lengths", "options"),
    [
        ("a model", 0, [1, 3], {}),
        ("an object", 1, [5, 4, 2], {"weighting": "samples"}),
        ("a model", 0, [2, 4], {"may_break": True}),
    ],
)
def test_an_average_that_one_rank_alone_keeps_is_named(
    workers: Workers, kind: str, keeper: int, lengths: list[int], options: dict[str, Any]
) -> None:
    said, *nothing = workers.run(len(lengths), keep_on_one, kind, keeper, lengths, options)
    assert not any(nothing)
    assert len(said) == 1
    name = "average.shadow" if kind == "an object" else r"average \(Sequential\)"
    others = ["missing", "missing", "missing"]
    others[keeper] = "changed"
    where = ", ".join(f"{what} on rank {rank}" for rank, what in enumerate(others[: len(lengths)]))
    assert re.search(rf"these had finished: {name} in keep_on_one\(\), .* \({where}\)\. .* pass it to Join", said[0])


@pytest.mark.parametrize(
    ("kind", "lengths", "what"),
    [
        ("a model", [0, 2], "unknown"),  # no batch at all
        ("windows", [1, 4], "unknown"),  # no step with its only batch
        ("at times", [4, 6], "changed"),  # not by its last step
        ("stream", [2, 4], "changed"),  # nobody knows which one is the last
        ("stream, a dict", [2, 4], "changed"),
        ("plain for", [2, 4], "changed"),
    ],
)
def test_so_it_is_where_the_last_step_shows_nothing(workers: Workers, kind: str, lengths: list[int], what: str) -> None:
    said, nothing = workers.run(2, keep_on_one, kind, 0, lengths, {})
    assert nothing == []
    assert len(said) == 1
    assert re.search(rf"average (\(Sequential\) )?in keep_on_one\(\), .* \({what} on rank 0, missing", said[0])


@pytest.mark.parametrize(("kind", "keeper"), [("a model", 1), ("the best so far", 0), ("only read", 0)])
def test_what_one_rank_keeps_to_the_end_or_only_reads_is_not_named(workers: Workers, kind: str, keeper: int) -> None:
    assert workers.run(2, keep_on_one, kind, keeper, [2, 4], {}) == [[], []]


READ = ("nothing", "given, and in an object", "the best so far", "a rank's own", "an evaluation's BatchNorm")


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_or_kept_by_a_rank_is_not_named(workers: Workers, kind: str) -> None:
    assert workers.run(2, trained, kind, [3, 1], {}) == [[], []]


def test_nothing_is_named_if_nobody_wants_to_know(workers: Workers) -> None:
    assert workers.run(2, trained, "a teacher", [1, 3], {"audit": False}) == [[], []]


def freed(rank: int) -> bool:
    """Whether a batch that was a variable of the loop's lives on in what its function was asked for."""
    ddp = DistributedDataParallel(net())
    seen: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(1 + 3 * (rank == 0)):
            yield torch.randn(3, 4)

    with Join([ddp]) as join:
        for x in join.batches(batches()):
            seen.append(weakref.ref(x))
            ddp(x).mean().backward()
    del x
    gc.collect()
    return not any(one() is not None for one in seen)


def test_what_is_looked_through_is_let_go(workers: Workers) -> None:
    assert all(workers.run(2, freed))
