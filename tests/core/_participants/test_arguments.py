"""What `Join` and `join_uneven_inputs` say of arguments that cannot be meant so."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.front_ends.accelerate import accelerator_of
from tests.support.joinables import WorldJoinable
from tests.support.workers import Workers
from torch_join import Join, JoinableModel, JoinTypeError, JoinValueError
from torch_join._handover.optimizers import with_wrapped
from torch_join._participants.arguments import check_options
from torch_join._participants.clears import innermost_optimizer

MISUSES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a model": (
        lambda: Join(nn.Linear(1, 1)),  # type: ignore[arg-type]
        JoinTypeError,
        r"joinables must be a list, not a Linear. Pass \[model, optimizer",
    ),
    "layers": (lambda: Join(nn.Sequential(nn.Linear(1, 1))), JoinTypeError, "not a Sequential"),  # type: ignore[arg-type]
    "a dictionary": (lambda: Join({"net": nn.Linear(1, 1)}), JoinTypeError, "not a dict"),  # type: ignore[arg-type]
    "nothing": (lambda: Join([]), JoinValueError, "requires at least one joinable: pass the objects that change"),
    "a loader": (
        lambda: Join([nn.Linear(1, 1), StatefulDataLoader([1])]),  # type: ignore[arg-type]
        JoinTypeError,
        r"The list of joinables contains a loader.*for batch in join.batches\(loader\)",
    ),
    "a mock": (
        lambda: Join([nn.Linear(1, 1), Mock()]),
        JoinTypeError,
        "The list of joinables contains a Mock, which has every attr",
    ),
    "seconds": (
        lambda: Join([nn.Linear(1, 1)], timeout=5),  # type: ignore[arg-type]
        JoinTypeError,
        r"not 5\. Write timeout=timedelta\(seconds=5\)",
    ),
    "misspelt": (
        lambda: Join([nn.Linear(1, 1)], weigthing="samples"),
        JoinTypeError,
        "Join has no argument 'weigthing'. Did you mean 'weighting'?",
    ),
    "unknown": (
        lambda: Join([nn.Linear(1, 1)], colour="red"),
        JoinTypeError,
        "Join has no argument 'colour', and no joinable has a hook that takes it. Remove it",
    ),
    "in one that does nothing": (
        lambda: Join([nn.Linear(1, 1)], enable=False, colour="red"),
        JoinTypeError,
        "Join has no argument 'colour'",
    ),
}


def test_what_is_followed_from_one_optimizer_to_the_next_comes_to_an_end() -> None:
    """A mock has an optimizer, and that one too; of two wrappers each may hold the other."""
    inner: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    outer = type("Outer", (torch.optim.SGD,), {})(inner.param_groups[0]["params"])
    inner.optimizer, outer.optimizer, outer.watched = outer, inner, Mock()
    assert innermost_optimizer(Mock()) is None
    assert innermost_optimizer(outer) is inner
    assert with_wrapped(outer) == [outer, inner]
    with Join([nn.Linear(1, 1), outer]) as join:
        assert list(join.batches([1])) == [1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", MISUSES)
def test_what_cannot_be_meant_says_what_to_do(name: str) -> None:
    make, kind, text = MISUSES[name]
    with pytest.raises(kind, match=text):
        make()


def test_what_can_be_iterated_over_is_a_list_and_a_time_is_taken() -> None:
    listed = Join(iter([nn.Linear(1, 1)]), enable=False, timeout=timedelta(seconds=5))  # type: ignore[arg-type]
    other = Join((nn.Linear(1, 1),), divide_by_initial_world_size=False, enable=False)
    for join in (listed, other):
        with join:
            assert [*join.batches([1, 2])] == [1, 2]


class Takes(WorldJoinable):
    """A joinable whose hook names what it takes."""

    def join_hook(self, *, colour: str = "", weights: int = 0) -> JoinHook:  # type: ignore[override]
        self.got = colour, weights
        return JoinHook()


class TakesAny(WorldJoinable):
    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.got = kwargs
        return JoinHook()


def give(rank: int) -> list[Any]:
    takes, takes_any = Takes(), TakesAny()
    Join([takes], colour="red", weights=2)
    Join([takes_any], shape="round")
    found: list[Any] = [takes.got, takes_any.got]
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    for make in (
        lambda: Join([takes_any], wieghting="samples"),
        lambda: Join([takes], shape="round"),
        lambda: Join([ddp], shape="round"),
        lambda: TorchJoin([JoinableModel(ddp)], weigthing="samples"),
    ):
        with pytest.raises(JoinTypeError) as caught:
            make()
        found.append(str(caught.value).split(".")[0])
    return found


def test_options_go_to_hooks_that_take_them(workers: Workers) -> None:
    for found in workers.run(2, give):
        assert found == [
            ("red", 2),
            {"shape": "round"},
            "Join has no argument 'wieghting'",
            "Join has no argument 'shape', and no joinable has a hook that takes it",
            "Join has no argument 'shape', and no joinable has a hook that takes it",
            "Join has no argument 'weigthing'",
        ]


WORDS = ("weight", "weights", "enabled", "timeouts", "audio", "audits", "auditor", "heart", "time", "hand_over", "able")
SLIPS = {
    "weighting": ("weigthing", "ewighting", "weightnig", "wighting", "weightin", "weeighting", "weughting"),
    "may_break": ("may_braek", "maybreak", "may_brek", "May_break"),
    "timeout": ("tiemout", "timeot", "time_out"),
    "audit": ("aduit", "adit", "audi"),
    "enable": ("enabel", "enble"),
    "hand_over_ignored": ("handover_ignored", "hand_over_ingored"),
    "hand_over_buffers": ("hand_over_buffer",),
    "rebalance": ("rebalanse", "reblance"),
    "backward_collectives": ("backwards_collectives",),
}


def give_words(rank: int) -> list[Any]:
    found: list[Any] = []
    for word in WORDS:
        takes_any = TakesAny()
        Join([takes_any], **{word: 2.0})
        TorchJoin([JoinableModel(DistributedDataParallel(nn.Linear(1, 1))), takes_any], **{word: 3.0})
        found.append(takes_any.got)
    return found


def test_a_hook_that_takes_anything_gets_words_that_resemble_ours(workers: Workers) -> None:
    for found in workers.run(2, give_words):
        assert [{word: options.get(word)} for word, options in zip(WORDS, found, strict=True)] == [
            {word: 3.0} for word in WORDS
        ]


@pytest.mark.parametrize(("own", "slip"), [(own, slip) for own, slips in SLIPS.items() for slip in slips])
def test_a_slip_does_not_get_there(own: str, slip: str) -> None:
    for joinables in ([TakesAny.__new__(TakesAny)], [nn.Linear(1, 1)]):
        with pytest.raises(JoinTypeError, match=f"Join has no argument '{slip}'. Did you mean '{own}'"):
            check_options({slip: 1}, joinables)


def test_the_error_lists_what_the_signature_has() -> None:
    named = [name for name in inspect.signature(Join).parameters if name not in ("joinables", "hooks")]
    with pytest.raises(JoinTypeError, match=f"the arguments are {', '.join(named)}, divide_by_initial_world_size"):
        Join([nn.Linear(1, 1)], shape="round", enable=False)


def misuse(rank: int, kind: str) -> None:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1))
        prepared: Any = DataLoaderShard([torch.ones(1, 1)] * 2, batch_size=None)  # type: ignore[arg-type]
        arguments: dict[str, tuple[Any, dict[str, Any]]] = {
            "model": (model, {}),
            "loader": ([model, prepared], {}),
            "misspelt": ([], {"may_brake": True}),
            "unknown": ([], {"colour": "red"}),
            "seconds": ([], {"timeout": 5}),
        }
        given, options = arguments[kind]
        with accelerator.join_uneven_inputs(given, **options):
            pass


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("model", "joinables must be a list, not a DistributedDataParallel"),
        ("loader", "Remove the loader and iterate over it in the context: `for batch in loader`"),
        ("misspelt", "Join has no argument 'may_brake'. Did you mean 'may_break'?"),
        ("unknown", "Join has no argument 'colour'"),
        ("seconds", "timeout=timedelta(seconds=5)"),
    ],
)
def test_the_same_with_accelerate(workers: Workers, kind: str, text: str) -> None:
    for outcome in workers.outcomes(2, misuse, kind):
        assert text in outcome.error, outcome
