"""`torch_join` under Ray Train: reports inside uneven loops, and Ray Data without lost rows."""

from collections.abc import Mapping
from typing import Any

from ray.train import DataConfig

from torch_join._participants.ray import Report

__all__ = ["Report", "UnequalShards"]


class UnequalShards(DataConfig):  # type: ignore[misc]
    """A `DataConfig` that drops no rows: workers get shards of different sizes.

    ```python
    TorchTrainer(train, datasets={"train": dataset}, dataset_config=UnequalShards(), ...)
    ```

    Ray's own `DataConfig` makes equal shards and drops up to (workers - 1) rows per epoch, because unequal shards hang
    without `Join`.

    Args:
        *args: The positional and keyword arguments of `ray.train.DataConfig`.
    """

    def configure(self, datasets: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Configure datasets as `DataConfig` does, but with unequal shards; Ray calls this."""
        unequal = {name: _Unequal(dataset) for name, dataset in datasets.items()}
        shards: list[dict[str, Any]] = super().configure(unequal, *args, **kwargs)
        return shards


class _Unequal:
    """A dataset that is never split into equal shards."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def copy(self, other: "_Unequal") -> "_Unequal":
        """Return a copy of `other`, as `Dataset.copy` does."""
        return _Unequal(other._dataset.copy(other._dataset))

    def streaming_split(self, shards: int, *, equal: bool, **options: Any) -> Any:
        """Split the dataset into unequal shards; `equal` is ignored."""
        return self._dataset.streaming_split(shards, equal=False, **options)
