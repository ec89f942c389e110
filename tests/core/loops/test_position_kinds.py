"""Places in loaders of other libraries: Hugging Face's datasets, WebDataset, LitData."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.core.loops import test_positions
from tests.core.loops.test_positions import SIZE, Case, Place, check, sizes_of
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="these packages are pinned for Python 3.11")


def ids_of(rank: int, lengths: tuple[int, ...]) -> list[int]:
    sizes = sizes_of(lengths)
    return [*range(1 + sum(sizes[:rank]), 1 + sum(sizes[: rank + 1]))]


def numbers(rows: Any) -> Tensor:
    values = [float(row["x"] if isinstance(row, dict) else row) for row in rows]
    return torch.tensor(values, dtype=torch.float64)[:, None]


def hugging_face(kind: str, rank: int, lengths: tuple[int, ...]) -> Any:
    import datasets

    ids = ids_of(rank, lengths)
    stream = datasets.Dataset.from_dict({"x": ids}).to_iterable_dataset(num_shards=min(3, len(ids)))
    if "shuffled" in kind:
        stream = stream.shuffle(seed=None if "unseeded" in kind else 5, buffer_size=4)
    return (StatefulDataLoader if "stateful" in kind else DataLoader)(stream, SIZE, collate_fn=numbers)


def web_dataset(kind: str, rank: int, lengths: tuple[int, ...], folder: str) -> Any:
    import webdataset

    path = Path(folder) / f"{rank}_{{0..2}}.tar"
    if not (Path(folder) / f"{rank}_0.tar").exists():
        for shard in range(3):
            with webdataset.TarWriter(str(Path(folder) / f"{rank}_{shard}.tar")) as tar:
                for number in ids_of(rank, lengths)[shard::3]:
                    tar.write({"__key__": str(number), "x.cls": number})
    seed = None if "unseeded" in kind else 5
    stream = webdataset.WebDataset(
        str(path), nodesplitter=None, shardshuffle=3, detshuffle="det" in kind, seed=5, empty_check=False
    )
    rows = stream.shuffle(4, initial=4, seed=seed).decode().to_tuple("x.cls").map(lambda row: row[0])
    return webdataset.WebLoader(rows, batch_size=SIZE, collate_fn=numbers)


def lit_data(folder: str) -> Any:
    import litdata

    stream = litdata.StreamingDataset(f"{folder}/optimized", shuffle=True, drop_last=False)  # deals out to the ranks
    return litdata.StreamingDataLoader(stream, batch_size=SIZE, collate_fn=numbers)


def sample(number: int) -> dict[str, int]:
    return {"x": number}


def train(rank: int, case: Case, folder: str, start: Place | None) -> dict[str, Any]:
    def loader_of(kind: str, rank: int, world_size: int, lengths: tuple[int, ...]) -> Any:
        if "hugging" in kind:
            return hugging_face(kind, rank, lengths)
        return lit_data(folder) if kind == "lit" else web_dataset(kind, rank, lengths, folder)

    with mock.patch.object(test_positions, "loader_of", loader_of):
        return test_positions.train(rank, case, folder, start)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("hugging, told", marks=pytest.mark.long),
        "hugging, shuffled, told",
        pytest.param("hugging, stateful, told", marks=pytest.mark.long),
        "hugging, stateful, shuffled, told",
        "web",
        "web, det",
        "lit",
    ],
)
def test_a_run_goes_on_in_other_libraries_loaders(workers: Workers, tmp_path: Path, kind: str) -> None:
    places = [(0, 1), (1, 3), (0, 8), (1, -1)]
    if kind == "lit":
        import litdata

        ids = [*range(1, 25)]
        litdata.optimize(sample, inputs=ids, output_dir=f"{tmp_path}/optimized", chunk_size=5, num_workers=1)
        places = [(0, 1), (1, 3), (1, -1)]
    lengths = (1, 4, 9) if "hugging" in kind else (0, 4, 9)  # an empty dataset cannot be made a stream
    check(workers, Case(kind, lengths), str(tmp_path), places, train)


def test_a_shuffle_by_the_clock_is_refused(workers: Workers, tmp_path: Path) -> None:
    found = [outcome.error for outcome in workers.outcomes(3, train, Case("web, unseeded"), str(tmp_path), None)]
    assert all("shuffles without a seed" in error for error in found), found


def test_another_seed_is_refused(workers: Workers, tmp_path: Path) -> None:
    case = Case("hugging, shuffled, unseeded", (1, 4, 9))
    workers.run(3, train, case, str(tmp_path), None)
    found = [outcome.error for outcome in workers.outcomes(3, train, case, str(tmp_path), (0, 1))]
    assert all("the seed of its shuffle" in error or "failed, so rank" in error for error in found), found
