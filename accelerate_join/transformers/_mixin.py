"""What comes before a `transformers.Trainer`: loaders with as many steps on all ranks, and a run around its loops."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard, prepare_data_loader
from torch.utils.data import SequentialSampler
from transformers.trainer_utils import EvalLoopOutput

from accelerate_join.transformers import _compat
from accelerate_join.transformers._loader import EvenedLoader, length_of
from accelerate_join.transformers._run import Run, check_supported
from torch_join import UnsupportedError, Weighting
from torch_join.integration import check_can_rebalance, resolve_weighting


class JoinTrainerMixin:
    """Makes a trainer exact where ranks have different numbers of batches; comes before `Trainer` among the bases.

    ```python
    class Mine(JoinTrainerMixin, SFTTrainer):
        own_shards = True
    ```

    Each rank runs every step of Trainer's own loop. One that has run out of batches goes through it with a batch
    without rows, and takes part in what the others do together. The options are attributes of the class, and may be
    given to `__init__` by name.

    Attributes:
        weighting: How the gradients of the ranks that have a batch are combined, where a loss is a mean: `"world"`
            (the default), `"active"` or `"samples"`, see `torch_join.Join`. A function that gets a batch, before it
            goes to a device, and returns what it counts weighs all micro-batches of a step by that. Where Trainer
            divides by the number of items in all batches (`num_items_in_batch`) the result is exact by itself: then
            this is `"world"`, or a function whose counts are taken in place of Trainer's.
        own_shards: Whether each rank's datasets are its own, so that nobody shards them again.
        rebalance: Whether ranks that have run out of batches get some of others', so that an epoch has as many steps as
            batches divided by ranks.
        throw_on_early_termination: Whether to raise on all ranks when the first one runs out of batches.
        kept: Names of attributes of the trainer that its steps add to, and a rank without batches is to take over.

    Raises:
        UnsupportedError: A rank without a batch cannot take part in how this trainer trains.
    """

    weighting: Weighting = "world"
    own_shards: bool = False
    rebalance: bool = False
    throw_on_early_termination: bool = False
    kept: ClassVar[tuple[str, ...]] = _compat.KEPT
    _join_run: Run | None = None
    args: Any
    accelerator: Any
    train_dataset: Any
    control: Any

    def __init__(
        self,
        *args: Any,
        weighting: Weighting | None = None,
        own_shards: bool | None = None,
        rebalance: bool | None = None,
        throw_on_early_termination: bool | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "weighting": weighting,
            "own_shards": own_shards,
            "rebalance": rebalance,
            "throw_on_early_termination": throw_on_early_termination,
        }
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)
        # A function in the body of a class, of a batch alone, would become a method.
        own = inspect.getattr_static(self, "weighting")
        takes_batch = isinstance(own, FunctionType) and own.__code__.co_argcount == 1
        self.weighting = resolve_weighting(own if takes_batch else self.weighting)
        if self.rebalance:
            check_can_rebalance(heartbeat=False, throw_on_early_termination=self.throw_on_early_termination)
        super().__init__(*args, **kwargs)

    # ------------------------------------------------------------ loaders

    def get_train_dataloader(self) -> Any:
        if self.own_shards and getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":
            raise UnsupportedError(
                "train_sampling_strategy='batch_rebalance' deals out the samples of one dataset among the ranks, and"
                " with own_shards=True each rank has a dataset of its own: most samples would be left out. Leave one"
                " of them out."
            )
        return self._evened(True, super().get_train_dataloader)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._evened(False, super().get_eval_dataloader, *args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._evened(False, super().get_test_dataloader, *args, **kwargs)  # type: ignore[misc]

    def _evened(self, trains: bool, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `get` returns, sharded without padding, or not at all where each rank has its own dataset."""
        if self.args.world_size == 1:
            return get(*args, **kwargs)
        accelerator = self.accelerator
        before = accelerator.even_batches
        accelerator.even_batches = False
        if self.own_shards:
            accelerator.prepare = self._prepare_own
        try:
            loader = get(*args, **kwargs)
        finally:
            accelerator.even_batches = before
            vars(accelerator).pop("prepare", None)
        if type(loader) is DataLoaderDispatcher or isinstance(loader.dataset, IterableDatasetShard):
            _warn_of_filled(type(self).__name__)
        if not isinstance(loader, DataLoaderShard):
            return loader
        if trains and callable(self.weighting):
            loader.device = None  # batches are counted first
        return EvenedLoader(loader, lambda: self._join_run, trains, self.own_shards, trains and self.rebalance)

    def _prepare_own(self, loader: Any) -> Any:
        """Do what `Accelerator.prepare` does with a loader, as if there were no other rank."""
        accelerator = self.accelerator
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            rng_types=None,
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if each is not None]
        dataset = given[0] if given else self.train_dataset
        if self.own_shards and length_of(dataset) == 0:
            return SequentialSampler(dataset)  # of no samples torch shuffles none
        return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)  # type: ignore[misc]
        if self._join_run is None or self._join_run.evaluates:
            return found
        return self._join_run.begin_window(batch_samples, found)

    def num_examples(self, dataloader: Any) -> int:
        if isinstance(dataloader, EvenedLoader) and dataloader.examples is not None:
            return dataloader.examples
        return super().num_examples(dataloader)  # type: ignore[misc,no-any-return]

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        if self._join_run is not None and isinstance(dataloader, EvenedLoader):
            self._join_run.tell_lengths(dataloader)
        return super().set_initial_training_values(args, dataloader, *more)  # type: ignore[misc]

    # ------------------------------------------------------------ runs

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Put around a loop of Trainer's."""
        if self.args.world_size == 1 or self._join_run is not None:
            yield
            return
        check_supported(self)
        with Run(self) as run:
            self._join_run = run
            try:
                with run.telling_failures():
                    yield
            finally:
                self._join_run = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._joining():
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joining():
            if self._join_run is None or not isinstance(dataloader, EvenedLoader):
                return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            with self._join_run.evaluation(dataloader) as samples:
                output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            return EvalLoopOutput(output.predictions, output.label_ids, output.metrics, sum(samples))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        control = self.control
        looks = control.should_log or control.should_evaluate or control.should_save
        if self._join_run is not None and (looks or control.should_epoch_stop or control.should_training_stop):
            self._join_run.hand_over_kept()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]


def _warn_of_filled(name: str) -> None:
    import warnings

    warnings.warn(
        f"{name}: Accelerate deals out this stream, and fills up its last batches with samples that are there already:"
        " they are trained on twice. To train on each sample once, give each rank a dataset of its own"
        " (own_shards=True).",
        stacklevel=4,
    )
