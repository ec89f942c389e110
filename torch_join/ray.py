"""`torch_join` under Ray Train: reports inside of uneven loops, and Ray Data without a lost row."""

from collections.abc import Mapping
from typing import Any

from ray.train import DataConfig

from torch_join._participants.ray import Report

__all__ = ["Report", "UnequalShards"]


class UnequalShards(DataConfig):  # type: ignore[misc]
    """A `DataConfig` that loses no row: workers get shards of different sizes.

    ```python
    TorchTrainer(train, datasets={"train": dataset}, dataset_config=UnequalShards(), ...)
    ```

    Ray's own cuts a dataset into equal shards, and drops up to one row for each worker but one, in each epoch, since
    without `Join` unequal shards hang.

    Args:
        *args: `ray.train.DataConfig`'s, as are all keyword arguments.
    """

    def configure(self, datasets: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Do what `DataConfig` does, but for equal shards; Ray calls this."""
        unequal = {name: _Unequal(dataset) for name, dataset in datasets.items()}
        shards: list[dict[str, Any]] = super().configure(unequal, *args, **kwargs)
        return shards


class _Unequal:
    """A dataset that is never cut into equal shards."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def copy(self, other: "_Unequal") -> "_Unequal":
        """Return a copy of another one, as `Dataset.copy` does."""
        return _Unequal(other._dataset.copy(other._dataset))

    def streaming_split(self, shards: int, *, equal: bool, **options: Any) -> Any:
        """Cut it, whatever is said of `equal`."""
        return self._dataset.streaming_split(shards, equal=False, **options)
