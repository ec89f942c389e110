"""The rows of all ranks, in order: as one process has them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.core.shards import batched, shards
from tests.support.rows import assert_same, rows_of
from tests.support.small import network
from tests.support.workers import Workers
from torch_join import Join
from torch_join.gather_in_order import gather_in_order

Lengths = tuple[int, ...]


def gather(rank: int, kind: str, samples: int, ranks: int, to: int | None, size: int, by_rank: bool) -> Any:
    mine = batched(shards(kind, samples, ranks)[rank], size)
    return gather_in_order([rows_of(each) for each in mine], mine, rank=to, by_rank=by_rank)


@pytest.mark.parametrize(
    ("kind", "samples", "ranks", "to", "size"),
    [("padded", 7, 3, None, 2), ("unpadded", 2, 3, 0, 2), ("empty", 9, 3, 1, 4), ("empty", 5, 2, None, 1)],
)
def test_each_index_once_in_order(
    workers: Workers, kind: str, samples: int, ranks: int, to: int | None, size: int
) -> None:
    for rank, found in enumerate(workers.run(ranks, gather, kind, samples, ranks, to, size, False)):
        if to is None or rank == to:
            assert_same(found, rows_of(range(samples)))
        else:
            assert found is None


def test_indices_of_shards(workers: Workers) -> None:
    """Each rank has a dataset of its own, of which it has some samples twice."""
    expected = rows_of([0, 1, 2, 3, 5, 0, 2])
    for found in workers.run(3, gather_shards):
        assert_same(found, expected)


def gather_shards(rank: int) -> Any:
    mine = [[[3, 0], [5, 1, 2]], [], [[2], [0, 2]]][rank]
    return gather_in_order([rows_of(each) for each in mine], mine, by_rank=True)


def without_indices(rank: int, lengths: Lengths, how: str) -> Any:
    mine = [[100 * rank + step] * (step + 1) for step in range(lengths[rank])]
    net = network()
    with Join([DistributedDataParallel(net)], enable=how != "disabled") as join:
        rows: Any = [rows_of(each) for _, each in enumerate(join.batches(mine))]
        if how == "one structure":
            return join.gather_in_order(rows_of([index for each in mine for index in each]) if mine else None)
        if how != "after":
            return join.gather_in_order(rows)
    return join.gather_in_order(rows)


@pytest.mark.parametrize(
    ("lengths", "how"),
    [((0, 3), "in"), ((2, 0, 3), "one structure"), ((1, 4), "after"), ((2, 2), "disabled"), ((0, 0), "in")],
)
def test_by_rank_without_indices(workers: Workers, lengths: Lengths, how: str) -> None:
    places = [100 * rank + step for rank, n in enumerate(lengths) for step in range(n) for _ in range(step + 1)]
    for found in workers.run(len(lengths), without_indices, lengths, how):
        assert_same(found, rows_of(places) if places else None)


def in_group(rank: int) -> Any:
    group = dist.new_group([1, 2])
    return gather_in_order([rows_of([rank])] * (rank - 1), group=group, rank=0) if rank else None


def test_in_a_group(workers: Workers) -> None:
    assert_same(workers.run(3, in_group)[1], rows_of([2]))


def in_pieces(rank: int) -> Any:
    count = [3, 0, 70_000][rank]
    rows = torch.arange(count)[:, None] * 1000 + torch.arange(100)  # 56 MB, which goes in several pieces
    found = gather_in_order([(rows, [*range(count)])], [range(1_000_000 * rank, 1_000_000 * rank + count)], rank=2)
    return None if found is None else (found[0][:, 0].tolist(), found[0].sum(1).tolist(), found[1])


def test_in_pieces(workers: Workers) -> None:
    first, sums, objects = workers.run(3, in_pieces)[2]
    numbers = [*range(3), *range(70_000)]
    assert objects == numbers
    assert first == [1000 * number for number in numbers]
    assert sums == [100_000 * number + 4950 for number in numbers]


def test_in_one_process() -> None:
    order = [3, 1, 0, 2, 1]
    assert_same(gather_in_order([rows_of(order[:2]), rows_of(order[2:])], [order[:2], order[2:]]), rows_of(range(4)))
    assert gather_in_order([]) is None


# ---------------------------------------------------------------- on steps that all ranks have, and others


def in_a_step(rank: int, at: int) -> Any:
    ddp, found = DistributedDataParallel(network()), None
    with Join([ddp]) as join:
        for step, index in enumerate(join.batches(range([2, 4][rank]))):
            with torch.no_grad():
                ddp(torch.ones(1, 3).double())
            if step == at:
                found = join.gather_in_order([torch.tensor([10 * rank + index])])
    return found.tolist() if found is not None else None


def test_in_a_step(workers: Workers) -> None:
    assert workers.run(2, in_a_step, 1) == [[1, 11]] * 2
    first, second = workers.outcomes(2, in_a_step, 2)
    assert "JoinError: join.gather_in_order was called in a step for which rank 0 had no batch" in second.error
    assert "call it after the loop" in second.error
    assert "PeerFailedError: Rank 1 failed" in first.error


def after_a_plain_loop(rank: int) -> Any:
    ddp = DistributedDataParallel(network())
    with Join([ddp]) as join:
        for _ in range(rank + 1):
            ddp(torch.ones(1, 3).double()).sum().backward()
        join.gather_in_order(None)


def test_after_a_plain_loop(workers: Workers) -> None:
    for outcome in workers.outcomes(2, after_a_plain_loop):
        assert "after the `with`" in outcome.error, outcome.trace


# ---------------------------------------------------------------- what cannot be joined

BAD: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], str]] = {
    "scalar": (lambda rank: [{"loss": torch.tensor(1.0)}], lambda _: None, "rows['loss'] is a 0-dim"),
    "rows": (
        lambda rank: [(torch.ones(2), torch.ones(3 - rank))],
        lambda _: None,
        "rank 0 cannot be gathered. Batch 0: rows[1] has 3 rows, but rows[0] has 2",
    ),
    "list of tensors": (
        lambda rank: [{"y": [torch.ones(3)] * 2}],
        lambda rank: [[0, 1, 2]],
        "rows['y'] has 2 rows, but its batch has 3. Return one row per sample: a tensor, or a list",
    ),
    "type": (lambda rank: ["text"], lambda _: None, "rows is a str"),
    "shapes": (
        lambda rank: [torch.ones(2, 3 + rank)],
        lambda _: None,
        "rank 0 has rows (float32 rows of [3]), and rank 1 has rows (float32 rows of [4])",
    ),
    "keys": (
        lambda rank: [{"a": [1]}, {"b": [1]}],
        lambda _: None,
        "batch 0 has rows['a'] (a list), and batch 1 has no rows['a']",
    ),
    "some indices": (lambda rank: [[1]], lambda rank: [[1]] if rank else None, "Rank 0 passed no indices"),
    "numbers": (lambda rank: [[1]], lambda rank: [[1], [2]], "indices for 2 batches, but rows for 1"),
    "floats": (lambda rank: [[1]], lambda rank: [[1.5]], "Indices must be integers, not [1.5]"),
    "pickle": (lambda rank: [[lambda: 0]], lambda _: None, "rows cannot be pickled"),
    "empty": (lambda rank: [{}], lambda _: None, "rows contains no tensors or lists"),
}


def gather_badly(rank: int) -> dict[str, str]:
    said = {}
    for kind, (rows, indices, _) in BAD.items():
        with Join([nn.Linear(1, 1)]) as join, pytest.raises(ValueError, match=r"rows|ranks") as error:
            join.gather_in_order(rows(rank), indices(rank))
        said[kind] = str(error.value)
    with pytest.raises(ValueError, match="in different ways"):
        gather_in_order([[1]], rank=rank)
    return said


def test_what_cannot_be_joined_raises_by_name_on_all_ranks(workers: Workers) -> None:
    for said in workers.run(2, gather_badly):
        for kind, (_, _, text) in BAD.items():
            assert text in said[kind]


def test_its_old_name_works() -> None:
    with Join([network()]) as join, pytest.warns(FutureWarning, match="gather was renamed to gather_in_order"):
        assert join.gather([torch.ones(2)]).tolist() == [1, 1]
