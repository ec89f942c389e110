"""The public joinables, in torch's own `Join` and in ours."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.core._participants.metrics import CASES, assert_value, history
from tests.covering import others_long
from tests.emulator import place
from tests.support.front_ends.plain import Loop, assert_same_bits, train
from tests.support.joinables import AllReducer, state_of, step_too_often
from tests.support.run import difference, reference
from tests.support.workers import Workers
from torch_join import (
    Join,
    JoinableMetric,
    JoinableModel,
    JoinableOptimizer,
    JoinableState,
    JoinTypeError,
    JoinValueError,
)

TORCHS = "torch's with joinables"
PROGRAMS = {
    "adam": Loop((3, 6)),
    "adam-empty": Loop((0, 4, 7), clip=0.3, scheduler="step"),
    "adam-turns": Loop(((2, 5, 3), (4, 1, 4), (0, 3, 6)), weighting="active", scheduler="plateau"),
    "sgd": Loop((6, 3), optimizer="sgd", weighting="active", clear="after"),
    "sgd-samples, even at first": Loop((2, 5, 3), optimizer="sgd", weighting="samples"),
    "sgd-samples": Loop((2, 5, 0), optimizer="sgd", weighting="samples"),
    "zero": Loop((3, 6), optimizer="zero", clip=0.3, scheduler="step"),
    "zero-empty": Loop((6, 0, 3), optimizer="zero", weighting="active"),
    "zero-turns": Loop(((5, 2), (1, 4), (3, 3)), optimizer="zero", clear="after, zeros"),
    "zero-window": Loop((5, 2), optimizer="zero", accumulate=2),
    "zero-window-left": Loop((7, 0, 4), optimizer="zero", accumulate=3),
    "window": Loop((4, 7, 0), accumulate=3, optimizer="sgd", clip=0.3),
    "norm": Loop((2, 5, 5), model="norm"),
    "penalty": Loop((3, 6), loss="penalty"),
    "two-forwards": Loop((2, 5, 0), loss="two forwards", optimizer="zero"),
    "two-backwards": Loop((2, 5), loss="two backwards", optimizer="zero"),
    "two-models": Loop((3, 0, 5), loss="two models", optimizer="zero"),
    "even": Loop((4, 4), optimizer="zero", scheduler="step"),
    "nothing": Loop((0, 0)),
    "one": Loop((3,)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("joins", [TORCHS, "our joinables"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str, joins: str) -> None:
    program = PROGRAMS[name]
    outcomes = workers.run(program.world_size, train, program, joins)
    expected = reference(program)
    assert_same_bits(outcomes)
    assert difference(outcomes[0].parameters, expected.parameters) < 1e-10
    assert outcomes[0].lr == expected.training.rates
    if program.model == "norm":
        assert difference(outcomes[0].buffers, expected.buffers) < 1e-10


# ---------------------------------------------------------------- metrics


def _stepped(rank: int, name: str, lengths: Sequence[int], with_model: bool, joins: Any) -> list[Any]:
    case = CASES[name]
    metric = case.build(dist_sync_on_step=True).set_dtype(torch.float64).to(place())
    model = DistributedDataParallel(nn.Linear(1, 1))
    with joins([*([JoinableModel(model)] if with_model else []), JoinableMetric(metric)]):
        found = []
        for step in range(lengths[rank]):
            if with_model:
                model(torch.ones(1, 1)).sum().backward()
            found.append(metric(*case.batch(rank, step)))
    return found


@pytest.mark.filterwarnings("ignore:Metric `.*` will save all targets:UserWarning")
@pytest.mark.covering(1)
@pytest.mark.parametrize("with_model", [True, False], ids=["model", "alone"])
@pytest.mark.parametrize("name", others_long(CASES, *[*CASES][::3]))
def test_a_metrics_step_is_synced_over_the_active_ranks(workers: Workers, name: str, with_model: bool) -> None:
    case, lengths = CASES[name], (2, 4, 0)
    for joins in (TorchJoin, Join) if name == "collection" else (TorchJoin,):
        for rank, found in enumerate(workers.run(3, _stepped, name, lengths, with_model, joins)):
            for step, value in enumerate(found):
                assert_value(value, case.expected(case.build, history(case, lengths, [step])))
            assert len(found) == lengths[rank]


# ---------------------------------------------------------------- torch's protocol


def _mixed(rank: int, lengths: Sequence[int]) -> tuple[list[float], int, list[bool], list[torch.Tensor]]:
    model = DistributedDataParallel(nn.Linear(2, 1).double())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    other, totals = AllReducer(times=2), []
    with TorchJoin([JoinableModel(model), other, JoinableOptimizer(optimizer)]):
        for step in range(lengths[rank]):
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            totals.append(other())
            if step != 1:  # so that ZeRO's hook waits in vain once
                optimizer.step()
    return totals, other.hooks, other.last, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("lengths", [(2, 5), (0, 2, 2), (4, 1, 2)])
def test_joinables_of_others_stand_among_them(workers: Workers, lengths: tuple[int, ...]) -> None:
    results = workers.run(len(lengths), _mixed, lengths)
    for rank, (totals, hooks, last, parameters) in enumerate(results):
        assert totals == [float(sum(step < n for n in lengths)) for step in range(lengths[rank])]
        assert hooks == max(lengths) - lengths[rank]
        assert last == [lengths[rank] == max(lengths)]
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][3], strict=True))


def _throw(rank: int, lengths: Sequence[int]) -> tuple[str, int, bool]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    before, steps, text = state_of(model), 0, ""
    try:
        with TorchJoin([JoinableModel(model)], throw_on_early_termination=True):
            for _ in range(lengths[rank]):
                model(torch.ones(1, 1)).sum().backward()
                steps += 1
    except RuntimeError as error:
        text = str(error)
    return text, steps, state_of(model) == before


def test_throw_on_early_termination(workers: Workers) -> None:
    ended, going = workers.run(2, _throw, [2, 4])
    assert ended == ("Rank 0 exhausted all inputs.", 2, True)
    assert going == ("Detected at least one rank that exhausted inputs. Throwing across all ranks.", 2, True)
    assert workers.run(2, _throw, [3, 3]) == [("", 3, True)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_has_no_place_in_a_step_raises_on_all_ranks(workers: Workers, world_size: int) -> None:
    outcomes = workers.outcomes(world_size, step_too_often, 1, 2)
    text = "JoinError: torch's Join cannot handle what JoinableOptimizer(ZeroRedundancyOptimizer) does"
    assert all(text in outcome.error for outcome in outcomes), outcomes
    assert "PeerFailedError: Rank" in outcomes[0].error
    assert all(outcome.error.startswith("JoinError") for outcome in outcomes[1:])
    assert all(outcome.seconds < 10 for outcome in outcomes)


# ---------------------------------------------------------------- manners


def _left_behind(rank: int, kind: str) -> list[Any]:
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    metric = CASES["sum"].build()
    joinables = [JoinableModel(model), JoinableOptimizer(optimizer), JoinableMetric(metric)]

    def state() -> list[Any]:
        hooks = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
        return [state_of(model), hooks, set(vars(metric))]

    before = state()
    for _ in range(2):  # the second time with the same joinables
        try:
            with TorchJoin(joinables, enable=kind != "disabled"):  # type: ignore[arg-type]
                inside = state()
                for step in range(3 if kind == "disabled" else 2 + rank):
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
                    if kind == "failed" and step == 1:
                        raise KeyError("mine")
        except KeyError:
            pass
    after = state()
    one = torch.ones(1)
    dist.all_reduce(one)
    return [inside == before, after == before, float(one)]


@pytest.mark.parametrize("kind", ["", "failed", "disabled"])
def test_nothing_is_left_behind(workers: Workers, kind: str) -> None:
    assert workers.run(2, _left_behind, kind) == [[kind == "disabled", True, 2.0]] * 2


def _refused(rank: int, kind: str, joins: Any) -> str:
    model = DistributedDataParallel(nn.Linear(1, 1))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    adam = torch.optim.Adam(model.parameters())
    metric = CASES["sum"].build
    given: dict[str, Callable[[], Any]] = {
        "no model": lambda: JoinableModel(model.module),  # type: ignore[arg-type]
        "no optimizer": lambda: JoinableOptimizer(model),  # type: ignore[arg-type]
        "no state": lambda: JoinableState(3),
        "no mere state": lambda: JoinableState(zero),
        "no metric": lambda: JoinableMetric(model),
        "optimizer first": lambda: joins([JoinableOptimizer(adam), JoinableModel(model)]),
        "state first": lambda: joins([JoinableState(adam)]),
        "metric first": lambda: joins([JoinableMetric(metric(dist_sync_on_step=True)), JoinableModel(model)]),
        "metric that leads nothing": lambda: joins([JoinableMetric(metric())]),
        "ZeRO after torch's DDP": lambda: joins([model, JoinableOptimizer(zero)]),
        "twice": lambda: joins([(one := JoinableModel(model)), one]),
    }
    before = state_of(model)[:2]  # torch leaves its own configuration behind
    with pytest.raises((JoinTypeError, JoinValueError)) as caught:
        given[kind]()
    text = str(caught.value)
    del caught
    return text if state_of(model)[:2] == before else "left something behind"


def _in_subgroup(rank: int, joins: Any) -> list[torch.Tensor]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3).double(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    program = Loop((2, 5))
    for epoch in range(2):
        with joins([JoinableModel(model), JoinableOptimizer(optimizer, group)]):
            for x, y in program.batches(2 - rank, epoch):
                optimizer.zero_grad()
                (model(x) - y).pow(2).mean().backward()
                optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("joins", [TorchJoin, Join])
def test_a_group_of_some_ranks(workers: Workers, joins: Any) -> None:
    _, first, second = workers.run(3, _in_subgroup, joins)
    torch.manual_seed(0)
    model, program = nn.Linear(4, 3).double(), Loop((2, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        for step in range(5):
            optimizer.zero_grad()
            for x, y in (batches[step] for r in range(2) if step < len(batches := program.batches(r, epoch))):
                ((model(x) - y).pow(2).mean() / 2).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert difference(first, list(model.parameters())) < 1e-10


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no model", "JoinableModel takes a DistributedDataParallel model, not Linear"),
        ("no optimizer", "JoinableOptimizer takes an optimizer, not DistributedDataParallel"),
        ("no state", "JoinableState takes an object with state_dict and load_state_dict, not int"),
        ("no mere state", "A ZeroRedundancyOptimizer takes part in each step"),
        ("no metric", "JoinableMetric takes a torchmetrics metric, not DistributedDataParallel"),
        ("optimizer first", r"JoinableOptimizer(Adam) is at the wrong place in the list"),
        ("state first", r"JoinableState(Adam) is at the wrong place in the list"),
        ("metric first", r"JoinableModel(DistributedDataParallel) is at the wrong place in the list"),
        ("metric that leads nothing", r"JoinableMetric(SumMetric) is at the wrong place in the list"),
        ("ZeRO after torch's DDP", r"JoinableOptimizer(ZeroRedundancyOptimizer) is at the wrong place in the list"),
        ("twice", "JoinableModel(DistributedDataParallel) was passed to Join twice"),
    ],
)
def test_what_cannot_be_made_right_is_refused(workers: Workers, kind: str, text: str) -> None:
    assert all(text in said for said in workers.run(2, _refused, kind, TorchJoin))
