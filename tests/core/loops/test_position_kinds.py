"""Places in loaders of other libraries: Hugging Face's datasets, WebDataset, LitData."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.core.loops.resumed import train
from tests.support.other_ranks import BEHIND, Chain, Collate, Samples, check, own
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="these packages are pinned for Python 3.11")


SIZE = 2


def hugging_face(kind: str, numbers: Sequence[int], collate: Any) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"number": [*numbers]})
    stream = rows.to_iterable_dataset(num_shards=min(3, len(numbers)))
    if "shuffled" in kind:
        stream = stream.shuffle(seed=None if "unseeded" in kind else 5, buffer_size=4)
    return (StatefulDataLoader if "stateful" in kind else DataLoader)(stream, SIZE, collate_fn=collate)


def web_dataset(kind: str, rank: int, numbers: Sequence[int], collate: Any, folder: str) -> Any:
    import webdataset

    path = Path(folder) / f"{rank}_{{0..2}}.tar"
    if not (Path(folder) / f"{rank}_0.tar").exists():
        for shard in range(3):
            with webdataset.TarWriter(str(Path(folder) / f"{rank}_{shard}.tar")) as tar:
                for number in numbers[shard::3]:
                    tar.write({"__key__": str(number), "x.cls": number})
    seed = None if "unseeded" in kind else 5
    stream = webdataset.WebDataset(
        str(path), nodesplitter=None, shardshuffle=3, detshuffle="det" in kind, seed=5, empty_check=False
    )
    rows = stream.shuffle(4, initial=4, seed=seed).decode().to_tuple("x.cls").map(lambda row: row[0])
    return webdataset.WebLoader(rows, batch_size=SIZE, collate_fn=collate)


def lit_data(folder: str, collate: Any) -> Any:
    import litdata

    stream = litdata.StreamingDataset(f"{folder}/optimized", shuffle=True, drop_last=False)  # deals out to the ranks
    return litdata.StreamingDataLoader(stream, batch_size=SIZE, collate_fn=collate)


def sample(number: int) -> dict[str, int]:
    return {"number": number}


def make(folder: str, chain: Chain, rank: int, world_size: int) -> list[Any]:
    kind, numbers, collate = chain.kind, chain.numbers(rank), Collate(Samples(chain.count))
    if "hugging" in kind:
        return [hugging_face(kind, numbers, collate)]
    return [lit_data(folder, collate) if kind == "lit" else web_dataset(kind, rank, numbers, collate, folder)]


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
    lengths = (1, 4, 9) if "hugging" in kind else (0, 4, 9)  # an empty dataset cannot be made a stream
    chain = own(kind, lengths, [(0, 1), (0, 1), (1, 8), (0, BEHIND)])
    if kind == "lit":
        import litdata

        ids = [*range(chain.count)]
        litdata.optimize(sample, inputs=ids, output_dir=f"{tmp_path}/optimized", chunk_size=5, num_workers=1)
        chain = own(kind, (4, 4, 4), [(0, 1), (0, 0), (1, 3), (0, BEHIND)], size=2)
        chain = replace(chain, count=len(ids))
    check(workers, chain, tmp_path, partial(train, make=partial(make, str(tmp_path))))


def test_a_shuffle_by_the_clock_is_refused(workers: Workers, tmp_path: Path) -> None:
    chain, making = own("web, unseeded", (0, 4, 9), [(0, 1)]), partial(make, str(tmp_path))
    found = workers.outcomes(3, partial(train, make=making), chain, 0, str(tmp_path), False)
    assert all("shuffles without a seed" in outcome.error for outcome in found), found


def test_another_seed_is_refused(workers: Workers, tmp_path: Path) -> None:
    chain = own("hugging, shuffled, unseeded", (1, 4, 9), [(0, 1)])
    resumed = partial(train, make=partial(make, str(tmp_path)))
    workers.run(3, resumed, chain, 0, str(tmp_path), False)
    found = [outcome.error for outcome in workers.outcomes(3, resumed, chain, 1, str(tmp_path), True)]
    assert all("the seed of its shuffle" in error or "failed, so rank" in error for error in found), found
