"""Accelerate's operations in the loop, while ranks have joined and with batches of different sizes."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState, utils
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.front_ends.accelerate import Lines, Script, Stream, accelerator_of, dataset, make_loader
from tests.support.inside import leader_of
from tests.support.run import Run
from tests.support.workers import Workers
from torch_join import JoinError

LENGTHS = [(4, 1), (1, 4), (0, 3), (3, 3), (2, 5, 0), (0, 2, 4), (5, 3, 4)]

KNOWS_MAX = "ReduceOp.MAX" in inspect.getsource(utils.operations.reduce)  # Accelerate adds up before 1.15


def operate(rank: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Do everything in each step; return what came out, by step."""
    script = Script(lengths=lengths)
    found = []
    with accelerator_of(rank) as accelerator:
        model, loader = accelerator.prepare(Run().build(), make_loader(script, rank))
        with accelerator.join_uneven_inputs() as join:
            for step, (numbers, x, _) in enumerate(loader):
                rows = numbers[: 1 + (rank + step) % 3]  # another number of rows on each rank
                mean = accelerator.gather(model(x).mean())
                model(x).sum().backward()
                accelerator.clip_grad_value_(model.parameters(), 0.5)
                model.zero_grad()
                accelerator.wait_for_everyone()
                wide = rows[:, None].repeat(1, rank + 1)
                found.append(
                    {
                        "active": join.active_ranks,
                        "rows": rows,
                        "gather": accelerator.gather(rows),
                        "nested": accelerator.gather({"a": rows, "b": (rows.double() / 2, rows > 2)}),
                        "free gather": utils.gather(rows),
                        "scalars": len(mean),
                        "for metrics": accelerator.gather_for_metrics(rows),
                        "objects for metrics": accelerator.gather_for_metrics(rows.tolist(), use_gather_object=True),
                        "strings": accelerator.gather_for_metrics([f"rank {rank}"]),
                        "gather object": utils.gather_object([{"rank": rank}]),
                        "sum": accelerator.reduce(torch.tensor(rank + 1.0)),
                        "mean": accelerator.reduce(torch.tensor(rank + 1.0), "mean"),
                        "free mean": utils.reduce({"x": torch.tensor(rank + 1.0)}, "mean")["x"],
                        "max": accelerator.reduce(torch.tensor(-rank - 1.0), "max"),
                        "padded": accelerator.gather(accelerator.pad_across_processes(wide, dim=1)),
                        "from main": utils.broadcast(torch.tensor([rank])),
                        "from last": utils.broadcast(torch.tensor([rank]), from_process=len(lengths) - 1),
                    }
                )
        assert len(utils.gather(torch.ones(2))) == 2 * len(lengths)
    return found


@pytest.mark.parametrize("lengths", LENGTHS)
def test_operations_are_over_the_active_ranks(workers: Workers, lengths: tuple[int, ...]) -> None:
    results = workers.run(len(lengths), operate, lengths)
    assert [len(found) for found in results] == list(lengths)
    for step in range(max(lengths)):
        active = [rank for rank, length in enumerate(lengths) if length > step]
        rows = torch.cat([results[rank][step]["rows"] for rank in active])
        for rank in active:
            found = results[rank][step]
            assert found["active"] == tuple(active)
            for name in ("gather", "free gather", "for metrics"):
                assert torch.equal(found[name], rows), name
            assert torch.equal(found["nested"]["a"], rows)
            assert torch.equal(found["nested"]["b"][0], rows.double() / 2)
            assert torch.equal(found["nested"]["b"][1], rows > 2)
            assert found["scalars"] == len(active)
            assert found["objects for metrics"] == rows.tolist()
            assert found["strings"] == [f"rank {one}" for one in active]
            assert found["gather object"] == [{"rank": one} for one in active]
            assert found["sum"] == sum(active) + len(active)
            assert found["mean"] == found["free mean"] == sum(active) / len(active) + 1
            assert not KNOWS_MAX or found["max"] == -active[0] - 1
            width = active[-1] + 1
            padded = [
                nn.functional.pad(r[:, None].repeat(1, a + 1), (0, width - a - 1)) for a, r in _rows(results, step)
            ]
            assert torch.equal(found["padded"], torch.cat(padded))
            assert found["from main"] == active[0]  # the lowest active rank stands in for one that has joined
            last = len(lengths) - 1
            assert found["from last"] == (last if last in active else active[0])


def _rows(results: Any, step: int) -> list[tuple[int, Tensor]]:
    return [(rank, found[step]["rows"]) for rank, found in enumerate(results) if step < len(found)]


def evaluate(rank: int, samples: int, even_batches: bool | None, options: dict[str, Any], iterable: bool) -> list[Any]:
    """Return, for each of two loops, the numbers of all samples that were gathered."""
    everything = []
    with accelerator_of(rank, dataloader_config=DataLoaderConfiguration(**options)) as accelerator:
        data: Any = dataset(samples)
        if iterable:
            data = Stream(data, samples)
        loader = accelerator.prepare(DataLoader(data, 6 if options.get("split_batches") else 3))
        model = accelerator.prepare(Run().build())
        with accelerator.join_uneven_inputs(even_batches=even_batches):
            for way in range(3):
                found: list[int] = []
                with torch.no_grad():
                    for numbers, x, _ in loader:
                        model(x)
                        if way == 0:
                            found += accelerator.gather_for_metrics(numbers).tolist()
                        elif way == 1:
                            found += accelerator.gather_for_metrics(numbers.tolist(), use_gather_object=True)
                        else:
                            found += accelerator.gather_for_metrics({"n": (numbers,)})["n"][0].tolist()
                everything.append(found)
    return everything


@pytest.mark.covering(1)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("samples", [1, 7, 18, 20])
@pytest.mark.parametrize("even_batches", [False, True, None])
def test_each_sample_is_gathered_once(
    workers: Workers, world_size: int, samples: int, even_batches: bool | None
) -> None:
    # On the rank that has most batches, which is the main process where Accelerate deals them out.
    found = workers.run(world_size, evaluate, samples, even_batches, {}, False)[0]
    assert [sorted(one) for one in found] == [list(range(samples))] * 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("samples", [7, 18, 20])
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"dispatch_batches": True}, {"split_batches": True}, {"dispatch_batches": True, "split_batches": True}],
    ids=str,
)
def test_each_sample_is_gathered_once_by_other_loaders(
    workers: Workers, options: dict[str, Any], samples: int, iterable: bool
) -> None:
    if iterable and "dispatch_batches" not in options:
        options = {**options, "dispatch_batches": True}
    found = workers.run(2, evaluate, samples, False, options, iterable)[0]
    assert [sorted(one) for one in found] == [list(range(samples))] * 3


def evaluate_own(rank: int, rows: tuple[int, ...], is_prepared: bool) -> tuple[list[int], list[str]]:
    """Return what a loop over own shards gathers, and the errors of plain loops over them, also skipped ones."""
    with accelerator_of(rank) as accelerator:
        first = sum(rows[:rank])
        data: Any = torch.arange(first, first + rows[rank])
        device = accelerator.device
        loader: Any = DataLoader(data, 4) if is_prepared else DataLoaderShard(data, device=device, batch_size=4)
        if is_prepared:
            loader = accelerator.prepare(loader, own_shards=True)
        found, errors = [], []
        for batch in accelerator.join_batches(loader):
            found += accelerator.gather_for_metrics(batch).tolist()
        # After a loop that was left, nothing is refused.
        for _ in accelerator.join_batches(loader):
            break
        assert len(accelerator.gather_for_metrics(torch.ones(2))) == 4
        for plain in (loader, accelerator.skip_first_batches(loader, 1)):
            for batch in plain:
                with pytest.raises(JoinError) as caught:
                    accelerator.gather_for_metrics(batch)
                errors.append(str(caught.value))
                break
        dealt = accelerator.prepare(DataLoader(torch.arange(13), 4))  # type: ignore[arg-type]
        skipped = [len(accelerator.gather_for_metrics(x)) for x in accelerator.skip_first_batches(dealt, 1)]
        assert len(skipped) == 1
        return found, errors


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("rows", [(10, 10), (9, 5), (5, 10)])
def test_own_shards_are_gathered_by_a_loop_that_joins_alone(
    workers: Workers, rows: tuple[int, ...], is_prepared: bool
) -> None:
    results = workers.run(2, evaluate_own, rows, is_prepared)
    assert sorted(max((found for found, _ in results), key=len)) == [*range(sum(rows))]
    for _, errors in results:
        assert len(errors) == 2
        assert all("accelerator.join_batches(loader)" in error for error in errors)


def differ(rank: int) -> None:
    with accelerator_of(rank) as accelerator:
        model = accelerator.prepare(Run().build())
        with accelerator.join_uneven_inputs():
            accelerator.gather(torch.ones(2, 3 + rank))
        del model


def test_other_dimensions_must_be_alike(workers: Workers) -> None:
    for outcome in workers.outcomes(2, differ):
        assert "differ between ranks in more than the number of rows" in outcome.error
        assert "pad_across_processes" in outcome.error


def stop_early(rank: int, lengths: tuple[int, ...], stops: int) -> tuple[int, float, int]:
    """Leave the loop on all ranks when one of them says so."""
    with accelerator_of(rank, gradient_accumulation_steps=2) as accelerator:
        model, loader = accelerator.prepare(Run().build(), make_loader(Script(lengths=lengths), rank))
        optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.1))
        steps = 0
        with accelerator.join_uneven_inputs():
            for step, (_, x, _) in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                steps += 1
                if step == stops and rank == lengths.index(max(lengths)):
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    break
            digest = sum(p.double().sum().item() for p in model.parameters())
        return steps, digest, accelerator.step


@pytest.mark.parametrize("lengths", [(2, 7), (7, 2), (1, 6, 7)])
def test_a_trigger_ends_the_loop_everywhere(workers: Workers, lengths: tuple[int, ...]) -> None:
    results = workers.run(len(lengths), stop_early, lengths, 3)
    assert [steps for steps, _, _ in results] == [min(4, length) for length in lengths]
    assert len({digest for _, digest, _ in results}) == 1
    assert {step for _, _, step in results} == {4}


def break_off(rank: int, may_break: bool) -> int:
    with accelerator_of(rank) as accelerator:
        model, loader = accelerator.prepare(Run().build(), DataLoader(dataset(20), 3))
        with accelerator.join_uneven_inputs(even_batches=True, may_break=may_break):
            for step, (_, x, _) in enumerate(loader):
                model(x).sum().backward()
                if step == 1:
                    break
            return len(accelerator.gather_for_metrics(torch.ones(3)))


@pytest.mark.parametrize("may_break", [False, True])
def test_nothing_is_cut_off_after_a_break(workers: Workers, may_break: bool) -> None:
    assert workers.run(2, break_off, may_break) == [6, 6]


def log_and_save(rank: int, lengths: tuple[int, ...], folder: str) -> None:
    with accelerator_of(rank, log_with=Lines(f"{folder}/lines")) as accelerator:
        accelerator.init_trackers("project")
        model, loader = accelerator.prepare(Run().build(), make_loader(Script(lengths=lengths), rank))
        with accelerator.join_uneven_inputs() as join:
            for step, (_, x, _) in enumerate(loader):
                model(x).sum().backward()
                model.zero_grad()
                accelerator.log({"x": leader_of(join)}, step=step)
                accelerator.save({"step": step}, f"{folder}/object-{step}")
                accelerator.save_model(model, f"{folder}/model-{step}")
                accelerator.print(f"step {step}")
        assert accelerator.process_index == PartialState().process_index == rank


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (0, 3, 2)])
def test_a_main_process_that_has_joined_is_stood_in_for(
    workers: Workers, lengths: tuple[int, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers.run(len(lengths), log_and_save, lengths, str(tmp_path))
    longest = max(lengths)
    leaders = [min(r for r, length in enumerate(lengths) if length > step) for step in range(longest)]
    assert (tmp_path / "lines").read_text().splitlines() == [f"{s} {r}" for s, r in enumerate(leaders)]
    for step in range(longest):
        assert torch.load(tmp_path / f"object-{step}") == {"step": step}
        assert (tmp_path / f"model-{step}" / "model.safetensors").exists()
