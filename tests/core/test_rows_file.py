"""A file of rows: what is written by all ranks is read in order, whole and in parts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.shards import batched, shards
from tests.support.rows import assert_same, rows_of
from tests.support.workers import Workers
from torch_join import JoinError, JoinValueError
from torch_join.rows_file import RowsPart, read_rows


def write(rank: int, folder: str) -> None:
    part = RowsPart(Path(folder) / "new" / "rows", rank, 4)
    for each in batched(shards("padded", 11, 3)[rank], 2):
        part.append(0, rows_of(each), each)
        part.append(1, torch.tensor(each).short(), None)
    for each in [[[5, 1], [1, 0]], [], [[2]]][rank]:
        part.append(3, {"names": [str(index) for index in each]}, each)
    part.finish([False, True, False, True])


def test_what_all_ranks_have_written(workers: Workers, tmp_path: Path) -> None:
    workers.run(3, write, str(tmp_path))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rows"]
    nested, short, nothing, names = read_rows(tmp_path / "new" / "rows")
    assert_same(nested[:], rows_of(range(11)))
    assert_same(nested[3:7], rows_of(range(3, 7)))
    assert_same(nested[4:4], rows_of([]))
    assert_same(nested[-1]["x"], rows_of([10])["x"][0])
    assert [row["deep"][1].labels for row in nested] == rows_of(range(11))["deep"][1].labels
    assert [row["objects"]["at"] for row in nested] == [*range(11)]
    in_turn = [index for rank in range(3) for index in shards("padded", 11, 3)[rank]]
    assert short[:].tolist() == in_turn
    assert [int(row) for row in short] == in_turn
    assert (len(nested), len(short), len(nothing), len(names)) == (11, 12, 0, 4)
    assert nothing[:] is None
    assert [*nothing] == []
    assert names[:] == {"names": ["0", "1", "5", "2"]}
    with pytest.raises(IndexError):
        nested[11]
    with pytest.raises(JoinValueError, match="with a step of 1, not 2"):
        nested[::2]


def write_badly(rank: int, folder: str, kind: str) -> list[str]:
    # Each on a disk of its own, or with other rows.
    part = RowsPart(Path(folder) / (f"disk{rank}" if kind == "disks" else "same") / "rows", rank, 1)
    part.append(0, {"x": torch.ones(2, 3)} if kind == "disks" or rank else {"x": torch.ones(2, 4)}, None)
    with pytest.raises(JoinError) as error:
        part.finish([True])
    return [str(error.value), *(path.name for path in Path(folder).rglob(f"*rows*{rank}"))]


@pytest.mark.parametrize(
    ("kind", "text"), [("disks", "Use a file system that all ranks share"), ("other", "rank 0 has rows")]
)
def test_what_cannot_be_written_raises_on_all_ranks(workers: Workers, kind: str, text: str, tmp_path: Path) -> None:
    for said, *left in workers.run(2, write_badly, str(tmp_path), kind):
        assert said.startswith("Rank 0 could not write the rows to")
        assert text in said
        assert left == []


def test_another_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"torch")
    with pytest.raises(JoinValueError, match="is not a rows file"):
        read_rows(tmp_path / "other")


def test_rows_that_are_other_than_in_the_batch_before(tmp_path: Path) -> None:
    part = RowsPart(tmp_path / "rows", 0, 1)
    part.append(0, [1], None)
    bad: Any = torch.ones(1)
    with pytest.raises(JoinValueError, match="the first batch has rows"):
        part.append(0, bad, None)
    part.abandon()
    assert [*tmp_path.iterdir()] == []
