"""Checkpoints while rank 0 has run out of batches, other calls of an engine's, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional

from tests.deepspeed.fronts import accelerate, lightning
from tests.support.front_ends.deepspeed import TIMEOUT, Net, Recipe, config_of, deepspeed_of, engine_of, outcome, train
from tests.support.workers import Workers
from torch_join import Join, JoinError, UnsupportedError, windows

LENGTHS = (1, 4)


def differences(one: Any, other: Any) -> list[str]:
    return [name for name, p in one.parameters.items() if not torch.equal(p, other.parameters[name])]


# ------------------------------------------------------------ checkpoints


def interrupted(rank: int, recipe: Recipe, folder: str) -> tuple[Any, Any, Any]:
    """Train, save in the tail, spoil all and load it there; and train another engine from the checkpoint on."""

    def save(join: Any, engine: Any) -> None:
        if join.step == 2 and not Path(folder, "here").exists():
            engine.save_checkpoint(folder, tag="here", client_state={"rank": rank, "kept": torch.ones(2)})

    def save_and_load(join: Any, engine: Any) -> None:
        if join.step == 2:
            engine.save_checkpoint(folder, tag="again")
            engine.load_checkpoint(folder, tag="again")

    whole = train(rank, recipe, save)
    same = (
        train(rank, recipe, save_and_load) if recipe.stage < 3 else whole
    )  # DeepSpeed's stage 3 loads into new engines
    with deepspeed_of(rank) as deepspeed:
        net = Net()
        engine, scheduler = engine_of(deepspeed, recipe, net)
        _, client_state = engine.load_checkpoint(folder, tag="here")
        with Join([engine, scheduler], timeout=TIMEOUT) as join:
            for epoch in range(recipe.epochs):
                rest = recipe.batches(rank)[3 if epoch == 0 else 0 :]
                for x, y in join.batches(rest):
                    engine.backward(functional.mse_loss(engine(x), y))
                    engine.step()
        return whole, same, (outcome(deepspeed, engine, net), client_state["rank"])


@pytest.mark.parametrize(("stage", "window"), [(1, 2), (2, 1), (3, 2)])
def test_a_checkpoint_in_the_tail_is_whole(workers: Workers, tmp_path: Path, stage: int, window: int) -> None:
    recipe = Recipe(LENGTHS, stage=stage, accumulate=window, optimizer="adamw")
    if window > 1:  # at a step of the optimizer's
        recipe = Recipe((1, 5), stage=stage, accumulate=3, optimizer="adamw")
    for whole, same, (resumed, saved_by) in workers.run(2, interrupted, recipe, str(tmp_path), deadline=120.0):
        assert differences(whole, same) == []
        assert differences(whole, resumed) == []
        assert whole.counters == same.counters
        assert whole.counters[1:] == resumed.counters[1:]  # DeepSpeed saves no number of micro-batches
        assert saved_by == 1  # rank 0, which writes it, has joined: the state is that of the lowest active rank


def saved_by_accelerate(rank: int, recipe: Recipe, folder: str) -> tuple[Any, list[str]]:
    def save(accelerator: Any, engine: Any) -> None:
        accelerator.save_state(folder)
        accelerator.save_model(engine, f"{folder}/model")

    found = accelerate(
        rank, recipe, each=lambda accelerator, engine: engine.global_steps == 3 and save(accelerator, engine)
    )
    return found, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_saves_in_the_tail(workers: Workers, tmp_path: Path, stage: int) -> None:
    recipe = Recipe(LENGTHS, stage=stage, optimizer="adamw", epochs=1)
    (first, names), (second, _) = workers.run(2, saved_by_accelerate, recipe, str(tmp_path), deadline=90.0)
    assert differences(first, second) == []
    assert {"model", "pytorch_model", "latest", "scheduler.bin"} <= {*names}


# ------------------------------------------------------------ other calls


def train_by_hand(rank: int, stage: int, joins: bool) -> Any:
    """Set boundaries, clear gradients that are not wanted, and change the learning rate, in and before the tail."""
    recipe = Recipe(LENGTHS, stage=stage, accumulate=3)
    with deepspeed_of(rank) as deepspeed:
        net = Net()
        engine, scheduler = engine_of(deepspeed, recipe, net)
        with Join([engine, scheduler], timeout=TIMEOUT) as join:
            batches = recipe.batches(rank)
            if not joins:
                batches += batches[-1:] * (max(LENGTHS) - len(batches))
            for number, (x, y) in enumerate(join.batches(batches)):
                share = 1.0 if rank or number < LENGTHS[0] else 0.0
                engine.set_gradient_accumulation_boundary(number % 2 == 1)
                engine.backward(functional.mse_loss(engine(x), y) * share)
                if number == 2 and stage < 2:
                    engine.optimizer.zero_grad()
                if number == 3:
                    for group in engine.optimizer.param_groups:
                        group["lr"] = 0.03
                if number % 2 == 1:
                    engine.step()
        return outcome(deepspeed, engine, net)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_boundaries_and_rates_of_the_loops_own(workers: Workers, stage: int) -> None:
    found = workers.run(2, train_by_hand, stage, True, deadline=60.0)
    expected = workers.run(2, train_by_hand, stage, False, deadline=60.0)
    for one, other in zip(found, expected, strict=True):
        assert differences(one, other) == []
        assert one.counters == other.counters


# ------------------------------------------------------------ what is refused


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.table(x)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the sum": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    "the caller's own accumulation": ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    "the profiler": ({"flops_profiler": {"enabled": True, "profile_step": 100}}, "the flops profiler"),
    "sparse embeddings": ({"net": Wide}, "sparse gradients"),
}


def refuse(rank: int, name: str) -> str:
    config, _ = REFUSED[name]
    recipe = Recipe(config={key: value for key, value in config.items() if key != "net"})
    with deepspeed_of(rank) as deepspeed:
        net = config.get("net", Net)()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(recipe))
        with pytest.raises(UnsupportedError) as caught, Join([engine], timeout=TIMEOUT):
            pass
        return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_joined_rank_could_follow_is_refused_on_all(workers: Workers, name: str) -> None:
    assert all(re.search(REFUSED[name][1], text) for text in workers.run(2, refuse, name))


def do_in_the_tail(rank: int, what: str) -> str:
    from deepspeed.utils import safe_get_full_fp32_param

    def do(join: Any, engine: Any) -> None:
        if join.active_ranks != (1,):
            return
        if what == "read":
            safe_get_full_fp32_param(next(engine.module.parameters()))
        elif what == "arguments":
            engine.step(lr_kwargs={})
        elif what == "clipped":
            engine.backward(engine(torch.ones(1, 4)).sum())
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
            engine.step()
        elif what == "twice":
            engine.backward(engine(torch.ones(1, 4)).sum(), retain_graph=True)
        elif what == "torch":
            engine(torch.ones(1, 4)).sum().backward()
        elif what == "coalesced":
            with engine.coalesce_grad_reduction():
                pass

    try:
        train(rank, Recipe(LENGTHS, stage={"read": 1, "clipped": 0}.get(what, 2)), do)
    except JoinError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("read", "ranks \\[0\\] have finished.*shards of finished ranks"),
        ("arguments", "step\\(\\) got arguments after ranks \\[0\\] finished"),
        ("clipped", "stage-0 DeepSpeed engine were modified by hand \\(clipped, for example\\) after ranks \\[0\\]"),
        ("twice", "retain_graph=True\\) was called after ranks \\[0\\]"),
        ("torch", "with loss.backward\\(\\).*after ranks \\[0\\].*Call engine.backward"),
        ("coalesced", "coalesce_grad_reduction\\(\\) was called after ranks \\[0\\]"),
    ],
)
def test_what_would_be_wrong_in_a_tail_raises_on_all(workers: Workers, what: str, says: str) -> None:
    for text in workers.run(2, do_in_the_tail, what, deadline=60.0):
        assert re.search(says, text), text


def go_wrong_before_the_tail(rank: int, what: str) -> str:
    recipe = Recipe((2, 4), stage=1)
    with deepspeed_of(rank) as deepspeed:
        engine, _ = engine_of(deepspeed, recipe, Net())
        batches = recipe.batches(rank)
        try:
            with Join([engine], weighting="samples", timeout=TIMEOUT) as join:
                if what == "windows":
                    for window in join.batches(windows(batches, 3)):
                        for x, _ in window:
                            engine(x)
                for x, y in join.batches(batches):
                    functional.mse_loss(engine(x), y).backward()
        except JoinError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize(
    ("what", "says"), [("windows", "torch_join.windows"), ("weights", "whose loss only engine.backward would weight")]
)
def test_what_would_be_wrong_in_any_step_raises_on_all(workers: Workers, what: str, says: str) -> None:
    for text in workers.run(2, go_wrong_before_the_tail, what, deadline=60.0):
        assert says in text, text


def save_whole(rank: int, stage: int, folder: str) -> Any:
    def save(join: Any, engine: Any) -> None:
        if join.step == 3:
            engine.save_16bit_model(folder, "whole.bin")

    return train(rank, Recipe(LENGTHS, stage=stage, epochs=1), save)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_model_is_saved_in_the_tail(workers: Workers, tmp_path: Path, stage: int) -> None:
    trained = workers.run(2, save_whole, stage, str(tmp_path), deadline=60.0)[0]
    saved = torch.load(tmp_path / "whole.bin")
    assert all(torch.equal(saved[name], parameter) for name, parameter in trained.parameters.items())


def saved_by_lightning(rank: int, recipe: Recipe, at: int, folder: str) -> Any:
    """Save at each step, and train from one in a tail on; train until there only."""
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = lightning(rank, recipe, callbacks=[saving], enable_checkpointing=True)
    resumed = lightning(rank, recipe, fit={"ckpt_path": f"{folder}/step={at}.ckpt"})
    return whole, resumed, lightning(rank, recipe, max_steps=at)


@pytest.mark.parametrize(("stage", "window", "at"), [(1, 1, 3), (3, 2, 1), (2, 1, 4)])
def test_lightning_saves_in_the_tail(workers: Workers, tmp_path: Path, stage: int, window: int, at: int) -> None:
    recipe = Recipe(LENGTHS, stage=stage, accumulate=window, optimizer="adamw")
    for whole, resumed, short in workers.run(2, saved_by_lightning, recipe, at, str(tmp_path), deadline=90.0):
        assert differences(whole, resumed) == []
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"step={at}.ckpt"), tag="checkpoint")
        assert [name for name, p in short.parameters.items() if not torch.equal(p, saved[f"net.{name}"])] == []
