"""Public names: one for each thing, the old one with a warning; all errors in each package; signatures that show."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import accelerate_join
import lightning_join
import lightning_join.fabric
import pytorch_lightning_join
import torch_join
from tests.support.front_ends.accelerate import accelerator_of
from tests.support.workers import Workers
from torch_join import Join, JoinError, JoinTypeError
from torch_join.integration import JoinOptions, Options, driver_of, refuse_misspelt


def join(**options: Any) -> Options:
    return driver_of(Join([nn.Linear(1, 1)], **options)).options


def strategy(name: str) -> Callable[..., Options]:
    kind: Any = getattr(lightning_join, name, None) or getattr(lightning_join.fabric, name.removeprefix("fabric."))
    return lambda **options: kind(**options).options


NAMES: dict[str, tuple[Callable[..., Options], str, str, bool]] = {
    "Join": (join, "heartbeat", "may_break", True),
    "Fabric, ddp": (strategy("fabric.DDPJoinStrategy"), "heartbeat", "may_break", True),
    "Fabric, fsdp": (strategy("fabric.FSDPJoinStrategy"), "heartbeat", "may_break", True),
    "Fabric, model parallel": (strategy("fabric.ModelParallelJoinStrategy"), "heartbeat", "may_break", True),
    "ddp": (strategy("DDPJoinStrategy"), "enable_join", "enable", False),
    "fsdp": (strategy("FSDPJoinStrategy"), "enable_join", "enable", False),
    "model parallel": (strategy("ModelParallelJoinStrategy"), "enable_join", "enable", False),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_old_name_works_and_warns(name: str) -> None:
    make, old, new, value = NAMES[name]
    with pytest.warns(FutureWarning, match=f"{old}= was renamed to {new}=. The old name works until 0.3.0") as caught:
        found = make(**{old: value})
    assert {each.filename for each in caught} == {__file__}
    assert found == make(**{new: value}) != make()


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_both_names_raise(name: str, value: bool) -> None:
    make, old, new, _ = NAMES[name]
    if new == "enable" and value:  # its default, which a configuration gives beside the old name
        return
    with pytest.raises(JoinTypeError, match=f"Both {new}= and its old name {old}= were passed. Remove {old}=\\."):
        make(**{old: True, new: value})


def use_old_names(rank: int) -> list[bool]:
    found = []
    with accelerator_of(rank) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        own = accelerate_join.join_uneven_inputs
        for make in (accelerator.join_uneven_inputs, lambda **options: own(accelerator, **options)):
            with pytest.warns(FutureWarning, match="heartbeat= was renamed to may_break=") as caught:
                context = make(heartbeat=True)
            assert caught[0].filename == __file__
            with context as inside:
                found.append(driver_of(inside).options.may_break)
            with pytest.raises(JoinTypeError, match="Both may_break= and its old name heartbeat= were passed"):
                make(heartbeat=True, may_break=True)
        with pytest.warns(FutureWarning, match="heartbeat= was renamed to may_break="):
            loop = accelerator.join_batches([1, 2], heartbeat=True)
        assert list(loop) == [1, 2]
        with pytest.raises(JoinTypeError, match="Both may_break= and its old name heartbeat= were passed"):
            accelerator.join_batches([1, 2], heartbeat=True, may_break=True)
    return found


def test_old_names_with_accelerate(workers: Workers) -> None:
    assert workers.run(1, use_old_names) == [[True, True]]


def errors(base: type[JoinError] = JoinError) -> Iterator[type[JoinError]]:
    """Go through the tree of errors."""
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == JoinError.__module__:
            yield from errors(kind)


@pytest.mark.parametrize(
    "package",
    [torch_join, lightning_join, pytorch_lightning_join, accelerate_join],
    ids=lambda package: package.__name__,
)
def test_each_package_has_all_errors(package: Any) -> None:
    tree = {kind.__name__: kind for kind in errors()}
    assert len(tree) == 7
    assert tree.items() <= {name: getattr(package, name) for name in package.__all__}.items()


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_join_takes_what_torchs_takes() -> None:
    theirs, ours = parameters(TorchJoin), parameters(Join)
    assert list(theirs) == ["joinables", "enable", "throw_on_early_termination", "kwargs"]
    for (name, their), (own_name, own) in zip(list(theirs.items())[:3], ours.items(), strict=False):
        assert (name, their.kind, their.default) == (own_name, own.kind, own.default)
    assert list(ours.values())[-1].kind is inspect.Parameter.VAR_KEYWORD


def test_an_option_has_one_default() -> None:
    defaults = {one.name: one.default for one in fields(Options) if one.name != "hooks"}
    shown = [parameters(Join), parameters(lightning_join.DDPJoinStrategy)]
    shown += [parameters(lightning_join.fabric.DDPJoinStrategy), parameters(lightning_join.JoinCallback)]
    for signature in shown:
        for name in signature.keys() & defaults.keys() - {"timeout"}:
            assert signature[name].default == defaults[name], name
    assert defaults.keys() <= shown[0].keys()
    assert shown[0]["timeout"].default == defaults["timeout"]
    assert JoinOptions.__annotations__.keys() == defaults.keys() - {"enable"} | {"divide_by_initial_world_size"}


STRATEGIES = ("DDPJoinStrategy", "FSDPJoinStrategy", "ModelParallelJoinStrategy", "DeepSpeedJoinStrategy")


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("module", [lightning_join, lightning_join.fabric], ids=lambda module: module.__name__)
def test_a_strategys_signature_shows_all_that_it_takes(module: Any, name: str) -> None:
    kind = getattr(module, name)
    (plain,) = [each for each in kind.__mro__ if each.__name__ == name.replace("Join", "")]
    shown = parameters(kind)
    assert {"weighting", "rebalance", "joinables", "hand_over_buffers", "timeout"} <= shown.keys()
    assert parameters(plain).keys() <= shown.keys()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("module", [lightning_join, lightning_join.fabric], ids=lambda module: module.__name__)
def test_a_misspelt_option_of_a_strategy_raises(module: Any, name: str) -> None:
    kind = getattr(module, name)
    for slip, meant in {"rebalanc": "rebalance", "wieghting": "weighting"}.items():
        with pytest.raises(JoinTypeError, match=f"{name} has no argument '{slip}'. Did you mean '{meant}'?"):
            kind(**{slip: True})
    # What goes to torch is none, though it may be near.
    refuse_misspelt(*parameters(kind), *parameters(DistributedDataParallel), *parameters(FullyShardedDataParallel))


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_option_of_other_loops_raises(name: str) -> None:
    with pytest.raises(JoinTypeError, match="which ends the loop on all ranks together"):
        getattr(lightning_join, name)(may_break=True)


def test_signatures_show_all_options() -> None:
    from accelerate_join.transformers import JoinTrainer

    options = parameters(Join).keys() - {"joinables", "enable", "hooks"}
    method = accelerate_join.Accelerator.join_uneven_inputs
    for function in (accelerate_join.join_batches, accelerate_join.join_uneven_inputs, method):
        assert options <= parameters(function).keys()
        assert parameters(function)["weighting"].default == "world"
    assert {"weighting", "own_shards", "rebalance", "train_dataset", "args"} <= parameters(JoinTrainer).keys()
    assert parameters(JoinTrainer)["weighting"].default == "world"


def test_the_signature_of_a_users_own_strategy() -> None:
    class Own(lightning_join.DDPJoinStrategy):
        def __init__(self, rate: float, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class Closed(lightning_join.DDPJoinStrategy):
        def __init__(self, rate: float) -> None:
            super().__init__()

    class Again(lightning_join.DDPJoinStrategy):
        def __init__(self, name: str, weighting: str = "samples", timeout: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class Empty(lightning_join.DDPJoinStrategy):
        def __init__() -> None:  # type: ignore[misc]
            pass

    assert list(parameters(Again))[:3] == ["name", "weighting", "timeout"]
    assert next(iter(parameters(Own))) == "rate"
    assert {"weighting", "accelerator", "kwargs"} <= parameters(Own).keys()
    assert list(parameters(Closed)) == ["rate"]


@pytest.mark.parametrize("name", ["weighting", "enable_join", "rebalance", "throw_on_early_termination"])
def test_what_a_strategy_was_made_with_can_be_read_and_not_set(name: str) -> None:
    made = lightning_join.DDPJoinStrategy(weighting="samples", rebalance=True)
    assert getattr(made, name) == getattr(made.options, "enable" if name == "enable_join" else name)
    with pytest.raises(AttributeError):
        setattr(made, name, "world")
