"""The context itself: what it takes, what it refuses, and what it leaves behind."""

import gc
import inspect
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import data_loader
from accelerate.utils import DistributedType, operations
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import accelerate_join
from accelerate_join import join_uneven_inputs
from tests.support.front_ends.accelerate import Script, accelerator_of, dataset, make_loader
from tests.support.inside import given_objects
from tests.support.joinables import Counter
from tests.support.run import Run, count_of
from tests.support.workers import Workers
from torch_join import Join, JoinError, UnsupportedError


def look(accelerator: Any, loaders: list[Any]) -> dict[str, Any]:
    """Return all that a context could have changed."""
    found: dict[str, Any] = {}
    for thing in (accelerator, accelerator.gradient_state, *loaders, *accelerator._optimizers):
        found[f"class {id(thing)}"] = type(thing)
        found[f"names {id(thing)}"] = sorted(vars(thing))
        for name, value in inspect.getmembers(type(thing)):
            found[f"{type(thing).__name__}.{name}"] = value
    for module in (operations, data_loader):
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    found["reduce"] = [cell.cell_contents for cell in operations.reduce.__closure__]
    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher, data_loader.BatchSamplerShard):
        found[kind.__name__] = dict(vars(kind))
    return found


def leave(rank: int, fails: bool) -> tuple[list[str], int]:
    with accelerator_of(rank) as accelerator:
        model, loader, optimizer = accelerator.prepare(
            Run().build(), make_loader(Script(lengths=(2, 4)), rank), torch.optim.Adam([torch.ones(1)])
        )
        list(loader)  # which leaves attributes of its own
        before = look(accelerator, [loader])
        hooks = len(model._forward_pre_hooks)
        try:
            with accelerator.join_uneven_inputs():
                assert isinstance(accelerator, accelerate_join.Accelerator)
                for _, x, _ in loader:
                    accelerator.backward(model(x).sum())
                    accelerator.gather(x)
                if fails:
                    raise KeyError
        except KeyError:
            pass
        del optimizer
        after = look(accelerator, [loader])
        changed = [name for name in before | after if before.get(name) is not after.get(name)]
        return [n for n in changed if before.get(n) != after.get(n)], len(model._forward_pre_hooks) - hooks


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(workers: Workers, fails: bool) -> None:
    for outcome in workers.outcomes(2, leave, fails):
        assert outcome.value == ([], 0), outcome.error


def alone(rank: int) -> tuple[list[int], list[int], Any]:
    with accelerator_of(rank) as accelerator:
        assert accelerator.distributed_type == DistributedType.NO
        model, loader = accelerator.prepare(nn.Linear(4, 3).double(), DataLoader(dataset(5), 2))
        sizes, gathered = [], []
        with accelerator.join_uneven_inputs([model], even_batches=False) as join:
            for numbers, x, _ in loader:
                model(x).sum().backward()
                sizes.append(len(numbers))
                gathered += accelerator.gather_for_metrics(numbers).tolist()
        with join_uneven_inputs(accelerator):
            pass
        return sizes, gathered, join.joined


def test_in_one_process_it_is_a_plain_loop(workers: Workers) -> None:
    assert workers.run(1, alone, store="") == [([2, 2, 1], [0, 1, 2, 3, 4], False)]


KINDS = [DistributedType.MEGATRON_LM, DistributedType.XLA]


def refuse(rank: int, kind: DistributedType) -> str:
    with accelerator_of(rank) as accelerator:
        accelerator.state.distributed_type = kind
        for context in (lambda: accelerator.join_uneven_inputs([]), lambda: join_uneven_inputs(accelerator)):
            with pytest.raises(JoinError) as caught, context():
                pass
        return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_supported_says_why(workers: Workers, kind: DistributedType) -> None:
    for text in workers.run(2, refuse, kind):
        assert f"join_uneven_inputs does not support {kind.value}: " in text
        assert "Use DistributedDataParallel" in text


def misuse(rank: int, kind: str) -> None:
    with accelerator_of(rank, gradient_accumulation_steps=2) as accelerator:
        net = Run().build()
        model = accelerator.prepare(net)
        options = {"weighting": count_of} if kind == "counted windows" else {}
        other = DistributedDataParallel(net) if kind == "wrapped twice" else None
        with accelerator.join_uneven_inputs(**options):
            if kind == "prepared inside":
                accelerator.prepare(nn.Linear(2, 2))
            elif kind == "trigger":
                accelerator.trigger_sync_in_backward(model)
            elif kind == "twice":
                with accelerator.join_uneven_inputs():
                    pass
        del other


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("prepared inside", "Prepare all models first"),
        ("trigger", "trigger_sync_in_backward synchronizes a model"),
        ("twice", "was passed to two nested Joins"),
        ("counted windows", "A weighting function cannot be used with gradient_accumulation_steps > 1"),
        ("wrapped twice", "is wrapped by 2 DistributedDataParallel models"),
    ],
)
def test_misuse(workers: Workers, kind: str, text: str) -> None:
    for outcome in workers.outcomes(2, misuse, kind):
        assert text in outcome.error, outcome.error


class Forwarding(DistributedDataParallel):
    """Has what its module has, as many wrappers do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def after_failures(rank: int) -> list[list[float]]:
    """As in a notebook, whose last traceback keeps what it has gone through."""
    with accelerator_of(rank) as accelerator:
        net = nn.Sequential(nn.LazyLinear(1, bias=False, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="uninitialized parameters") as late:  # it has its module by then
            DistributedDataParallel(net)
        with pytest.raises(RuntimeError, match="any parameter that requires a gradient") as early:
            Forwarding(nn.ReLU())
        net(torch.ones(1, 2, dtype=torch.float64))
        model = accelerator.prepare(net)
        with accelerator.join_uneven_inputs() as join:
            for x in join.batches([torch.ones(1, 2, dtype=torch.float64)] * (1 + rank)):
                model.zero_grad()
                model(x).sum().backward()
        del late, early
        return [parameter.grad.tolist() for parameter in net.parameters()]


def test_a_wrapper_whose_construction_has_failed_counts_for_nothing(workers: Workers) -> None:
    first, second = workers.run(2, after_failures)
    assert first == second == [[[0.5, 0.5]]]  # rank 1 alone has a last batch, of a world of two


def prepare_anew(rank: int) -> int:
    """As after an attempt that ran out of memory."""
    with accelerator_of(rank) as accelerator:
        net = Run().build()
        model = accelerator.prepare(net)
        model.itself = [model]  # garbage, in a cycle
        del model
        accelerator.free_memory()
        again = accelerator.prepare(net)
        with accelerator.join_uneven_inputs() as join:
            assert given_objects(join)[0] is again
            return sum(isinstance(thing, DistributedDataParallel) for thing in given_objects(join))


def test_a_model_that_was_prepared_anew(workers: Workers) -> None:
    assert workers.run(2, prepare_anew) == [1, 1]


class Frozen(nn.Linear):
    pass


def collect(rank: int) -> list[str]:
    with accelerator_of(rank) as accelerator:
        frozen = Frozen(2, 2)
        for parameter in frozen.parameters():
            parameter.requires_grad = False
        net = nn.Linear(4, 3).double()
        adam = torch.optim.Adam(net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
        model, optimizer, scheduler = accelerator.prepare(net, adam, scheduler)
        accelerator.prepare_model(frozen, evaluation_mode=True)
        accelerator.register_for_checkpointing(scheduler.scheduler, average := nn.Linear(1, 1))
        counter = Counter()
        with accelerator.join_uneven_inputs([counter, model, optimizer]) as join:
            assert isinstance(join, Join)
            names = [type(thing).__name__ for thing in given_objects(join)]
        del average
        return names


def test_what_takes_part(workers: Workers) -> None:
    names = ["Counter", "DistributedDataParallel", "Adam", "StepLR", "Linear", "Progress"]
    assert workers.run(2, collect) == [names] * 2


def count_ones(rank: int) -> int:
    """A custom joinable among what was prepared."""
    with accelerator_of(rank) as accelerator:
        counter = Counter()
        total = 0
        model, loader = accelerator.prepare(Run().build(), make_loader(Script(lengths=(2, 4)), rank))
        with accelerator.join_uneven_inputs([counter]):
            for _, x, _ in loader:
                model(x).sum().backward()
                total += counter.count()
        return total


def test_a_custom_joinable(workers: Workers) -> None:
    assert workers.run(2, count_ones) == [4, 6]


def test_the_signature_is_accelerates() -> None:
    theirs = list(inspect.signature(accelerate.Accelerator.join_uneven_inputs).parameters)
    ours = inspect.signature(accelerate_join.Accelerator.join_uneven_inputs).parameters
    assert list(ours)[1 : len(theirs)] == theirs[1:]  # the first is the accelerator
    function = inspect.signature(join_uneven_inputs).parameters
    assert list(function)[:3] == ["accelerator", "joinables", "even_batches"]
    assert function["even_batches"].default is False
    assert ours["even_batches"].default is False
    assert issubclass(UnsupportedError, accelerate_join.JoinError)
    gc.collect()
    assert not dist.is_initialized()
