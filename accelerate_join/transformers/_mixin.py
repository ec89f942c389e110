"""A mixin for `transformers.Trainer`: all ranks have the same number of steps, and each loop has a `Run`."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, IterableDatasetShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from accelerate_join import _compat_transformers as _compat
from accelerate_join import _prepared
from accelerate_join._compat import forget_prepared, has_prepared
from accelerate_join._loaders import prepare_own, refuse_distributed_sampler
from accelerate_join.transformers._evaluation import by_rank, in_one_order
from accelerate_join.transformers._loader import EvenedLoader
from accelerate_join.transformers._run import Run
from torch_join import JoinDataWarning, JoinTypeError, UnsupportedError, Weighting
from torch_join.integration import (
    Options,
    Placeholder,
    factor_of_count,
    length_of,
    refuse_misspelt,
    setting,
    whole_signature,
)

_OPTIONS = ("weighting", "rebalance", "throw_on_early_termination", "placeholder")
_NAMES = (*_OPTIONS, "own_shards", "kept")
_LOADERS = {"get_train_dataloader": True, "get_eval_dataloader": False, "get_test_dataloader": False}


class JoinTrainerMixin:
    """Mixin that makes a trainer exact on uneven dataloaders; list it before the trainer class in the bases.

    ```python
    class Mine(JoinTrainerMixin, SFTTrainer):
        own_shards = True
    ```

    Each rank runs every step of Trainer's own loop; a finished rank runs them with empty batches and follows the
    collectives of the others. The options are class attributes, and `__init__` also takes them as keyword arguments.

    Attributes:
        weighting: How to combine the gradients of the active ranks if a loss is a mean: `"world"` (the default),
            `"active"` or `"samples"`, see `torch_join.Join`. A function takes a batch, before it moves to a device, and
            returns its count, which weights all micro-batches of a step. If Trainer divides by the number of items in
            all batches (`num_items_in_batch`), the result is already exact; use `"world"`, or a function whose counts
            replace Trainer's.
        own_shards: Whether each rank has its own datasets, so that Trainer does not shard them.
        rebalance: Whether finished ranks receive batches from other ranks, so that an epoch takes (number of batches /
            number of ranks) steps.
        throw_on_early_termination: Whether to raise on all ranks as soon as one rank runs out of batches before the
            others.
        placeholder: The batch on which a finished rank runs its steps, for models that span several ranks (experts,
            sharded embeddings): `"last"`, `"rows"` or a function, see `torch_join.Join`. The loss of such a step has
            zero weight.
        kept: Names of trainer attributes that accumulate over steps; a finished rank receives their values.

    Raises:
        UnsupportedError: Finished ranks cannot take part in this trainer's training.
    """

    weighting: Weighting = "world"
    own_shards: bool = False
    rebalance: bool = False
    throw_on_early_termination: bool = False
    placeholder: Placeholder | None = None
    kept: ClassVar[tuple[str, ...]] = _compat.KEPT
    _join_run: Run | None = None
    _resumes_from: str | None = None
    args: Any
    accelerator: Any
    control: Any
    state: Any
    current_gradient_accumulation_steps: int
    train_dataset: Any
    eval_dataset: Any
    # Used in a single process.
    _counts: Sequence[tuple[Any, float]] = ()  # each micro-batch of the window and its count
    _evaluates = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if Trainer in bases and bases.index(Trainer) < bases.index(JoinTrainerMixin):
            raise JoinTypeError(
                f"{cls.__name__} lists JoinTrainerMixin after Trainer in its base classes, where it has no effect."
                " Put JoinTrainerMixin before the trainer class."
            )
        named = [name for name in vars(cls) if not name.startswith("_")]  # others are the user's own, as `_monitor`
        new = [name for name in named if not any(hasattr(base, name) for base in cls.__bases__)]
        refuse_misspelt(*new, owner=cls.__name__, options=_NAMES)
        for name, trains in _LOADERS.items():
            if name in vars(cls):  # a subclass's own loaders are evened, too
                setattr(cls, name, _evening(trains, vars(cls)[name]))
        cls.__signature__ = None  # type: ignore[attr-defined]  # instead of its base's
        with suppress(TypeError, ValueError):  # a user's class may order its parameters differently
            cls.__signature__ = whole_signature(cls, JoinTrainerMixin)  # type: ignore[attr-defined]

    def __init__(
        self,
        *args: Any,
        weighting: Weighting = Options.weighting,
        own_shards: bool | None = None,
        rebalance: bool | None = None,
        throw_on_early_termination: bool | None = None,
        placeholder: Placeholder | None = None,
        **kwargs: Any,
    ) -> None:
        given = locals()
        refuse_misspelt(*kwargs, owner=type(self).__name__, options=_NAMES)
        for name in (*_OPTIONS, "own_shards"):
            if given[name] is not None and given[name] is not Options.weighting:
                setattr(self, name, given[name])
        for name in ("weighting", "placeholder"):
            # A function in the class body that takes only a batch would become a method.
            own = inspect.getattr_static(self, name)
            if isinstance(own, FunctionType) and own.__code__.co_argcount == 1:
                setattr(self, name, own)
        self.weighting = self.join_options.weighting  # checked
        if self.own_shards:
            _check_own_shards(
                self, dict(zip(inspect.signature(super().__init__).parameters, args, strict=False)) | kwargs
            )
        super().__init__(*args, **kwargs)

    @property
    def join_options(self) -> Options:
        """The options in the attributes."""
        return Options.of({name: getattr(self, name) for name in _OPTIONS})

    @property
    def joined(self) -> bool:
        """Whether this rank runs a placeholder in the current step, with zero weight; see `placeholder`."""
        return self._join_run is not None and self._join_run.joined

    # ------------------------------------------------------------ loaders

    def get_train_dataloader(self) -> Any:
        if self.own_shards and getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":
            raise UnsupportedError(
                "train_sampling_strategy='batch_rebalance' cannot be combined with own_shards=True: it distributes a"
                " single dataset, but each rank has its own dataset, so most samples would be skipped. Remove one"
                " option."
            )
        return self._evened(True, super().get_train_dataloader)  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._evened(False, super().get_eval_dataloader, *args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._evened(False, super().get_test_dataloader, *args, **kwargs)  # type: ignore[misc]

    def _evened(self, trains: bool, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loader from `get`, sharded without padding, or unsharded if each rank has its own dataset."""
        if self.args.world_size == 1:
            loader = get(*args, **kwargs)
            if trains and callable(self.weighting) and isinstance(loader, DataLoaderShard):
                loader.device = None  # batches are counted before they move
            return loader
        accelerator = self.accelerator
        own = {"prepare_data_loader": self._prepare_own} if self.own_shards else {}
        with setting(accelerator, even_batches=False, **own):
            loader = get(*args, **kwargs)
        if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            # A subclass returned a loader that is not prepared, so it shards the data itself.
            loader = self._prepare_own(loader, use_seedable_sampler=False)
        if isinstance(loader, EvenedLoader):
            return loader
        if type(loader) is DataLoaderDispatcher or isinstance(getattr(loader, "dataset", None), IterableDatasetShard):
            refuse_distributed_sampler(loader.batch_sampler, self.args.world_size)
            JoinDataWarning.warn(
                f"{type(self).__name__}: Accelerate splits this stream among the ranks, and fills its last batches with"
                " repeated samples, which are trained on twice. To train on each sample once, give each rank its own"
                " dataset (own_shards=True)."
            )
        if not isinstance(loader, DataLoaderShard):
            return loader
        return EvenedLoader(loader, self, trains)

    def _prepare_own(self, loader: Any, *_: Any, use_seedable_sampler: bool | None = None, **__: Any) -> Any:
        return loader if has_prepared(loader) else prepare_own(self.accelerator, loader, seedable=use_seedable_sampler)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        dataset = next((each for each in (*args, *kwargs.values()) if each is not None), self.train_dataset)
        if self.own_shards and length_of(dataset) == 0:
            return SequentialSampler(dataset)  # torch does not shuffle an empty dataset
        return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)  # type: ignore[misc]
        if self._join_run is not None:
            return self._join_run.begin_window(batch_samples, found)
        if not callable(self.weighting) or self._evaluates:
            return found
        # In a single process, a window's count does not depend on other ranks.
        self._counts = [(batch, self.weighting(batch)) for batch in batch_samples]
        return found if found is None else torch.as_tensor(self._counted_alone, device=self.args.device)

    @property
    def _counted_alone(self) -> float:
        return math.fsum(float(count) for _, count in self._counts)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        step = super().training_step  # type: ignore[misc]
        if self._join_run is not None or not callable(self.weighting) or num_items_in_batch is not None:
            return step(model, inputs, num_items_in_batch, **kwargs)
        own_count = next(float(count) for batch, count in self._counts if batch is inputs)
        factor = self.current_gradient_accumulation_steps * factor_of_count(1, own_count, self._counted_alone)
        backward = self.accelerator.backward
        with setting(self.accelerator, backward=lambda loss, **more: backward(loss * factor, **more)):
            return step(model, inputs, num_items_in_batch, **kwargs) * factor

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if self.own_shards and length_of(eval_dataset) == 0:
            return SequentialSampler(eval_dataset)  # Trainer's sampler would read its first sample
        return super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]

    def num_examples(self, dataloader: Any) -> int:
        if isinstance(dataloader, EvenedLoader) and dataloader.examples is not None:
            return dataloader.examples
        return super().num_examples(dataloader)  # type: ignore[misc,no-any-return]

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        run = self._join_run if isinstance(dataloader, EvenedLoader) else None
        if run is not None:
            run.exchange_lengths(dataloader)
        values = super().set_initial_training_values(args, dataloader, *more)  # type: ignore[misc]
        folder = None if args.ignore_data_skip else self._resumes_from
        if run is None or folder is None:
            return values
        return run.position.resume(folder, dataloader, values)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        resized = None if self._join_run is None else self._join_run.position.resized
        return found if resized is None else (resized.epoch, resized.before)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        resized = None if self._join_run is None else self._join_run.position.resized
        if resized is not None and kwargs.get("epoch") == resized.epoch:
            kwargs |= {"steps_in_epoch": resized.batches, "num_update_steps_per_epoch": resized.updates}
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------ runs

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Wrap one of Trainer's loops in a `Run`."""
        if self.args.world_size == 1 or self._join_run is not None:
            yield
            return
        _check_supported(self)
        with Run(self).running():
            yield

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        folder = kwargs.get("resume_from_checkpoint")
        if self.args.world_size == 1 and folder is not None and not self.args.ignore_data_skip:
            _compat.refuse_to_resize(folder, 1)
        with self._joining(), setting(self, _resumes_from=folder):
            if self._join_run is not None:
                _have_wrapped(self)
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self._join_run is not None:
            self._join_run.position.save(output_dir)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(given, dict):
            return super().evaluate(eval_dataset, *args, **kwargs)  # type: ignore[misc]
        with self._joining():
            if self._join_run is not None:
                given = in_one_order(self._join_run.channel, given)
            if eval_dataset is not None:
                return super().evaluate(given, *args, **kwargs)  # type: ignore[misc]
            self.eval_dataset = given  # Trainer requests each dataset by its name
            return super().evaluate(None, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joining():
            if self._join_run is None or not isinstance(dataloader, EvenedLoader):
                with setting(self, _evaluates=True):
                    return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            with self._join_run.evaluation(dataloader) as samples:
                output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            found = output.predictions, output.label_ids
            if dataloader.owns and getattr(self.args, "eval_do_concat_batches", True):
                found = by_rank(found, samples)  # keep each rank's shard together
            return EvalLoopOutput(*found, output.metrics, sum(map(sum, samples)))

    def prediction_loop(self, *args: Any, **kwargs: Any) -> Any:  # the legacy loop of transformers 4
        return self.evaluation_loop(*args, **kwargs)

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> None:
        control = self.control
        if self._join_run is not None:
            self._join_run.stopping.agree(control, self.state.global_step)
        looks = control.should_log or control.should_evaluate or control.should_save
        if self._join_run is not None and (looks or control.should_epoch_stop or control.should_training_stop):
            self._join_run.hand_over_kept()
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]
        if self._join_run is not None:
            self._join_run.stopping.agree(self.control, self.state.global_step)  # callbacks may request a stop, too
            self._join_run.average_loss(tr_loss)


def _evening(trains: bool, get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a trainer's method that makes a loader, so that the loader has the same number of steps on all ranks."""

    @wraps(get)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evened(trains, get.__get__(self), *args, **kwargs)

    return call


def _check_supported(trainer: Any) -> None:
    """Raise if ranks without a batch cannot take part in this trainer's training; the result is equal on all ranks.

    Raises:
        UnsupportedError: They cannot.
    """
    name = type(trainer).__name__
    _prepared.check_supported(trainer.accelerator, name)
    if any(base.__name__ in _compat.GENERATING for base in type(trainer).__mro__):
        raise UnsupportedError(
            f"{name} generates and scores with all ranks before each step, but a finished rank would be missing from"
            " its process groups. Give all ranks the same number of prompts, and remove JoinTrainerMixin."
        )
    if getattr(trainer, "get_tp_size", lambda: 1)() > 1:
        raise UnsupportedError(
            f"{name} got a tensor-parallel model, whose ranks compute each batch together, so none of them can finish"
            " first. Shard the model with FSDP, or give all ranks the same number of batches and remove"
            " JoinTrainerMixin."
        )
    if trainer.args.auto_find_batch_size:
        raise UnsupportedError(
            f"{name} does not support auto_find_batch_size=True, which restarts training with smaller batches only on"
            " the rank that lacks memory. Find per_device_train_batch_size in a single process, and set it."
        )


def _have_wrapped(trainer: Any) -> None:
    """Let Accelerate wrap a model that it prepared for an evaluation, and considers wrapped since."""
    wrapped = trainer.model_wrapped
    if isinstance(_prepared.unwrap(wrapped), DistributedDataParallel) or _prepared.is_called_itself(wrapped):
        return
    trainer.model_wrapped = trainer.model
    forget_prepared(trainer.model)


def _check_own_shards(trainer: Any, given: dict[str, Any]) -> None:
    """Raise if a trainer with these arguments needs a dataset that is the same on all ranks.

    Raises:
        UnsupportedError: On all ranks, if it does, or reads the first sample of a dataset that is empty on some rank.
    """
    arguments = next((each for each in given.values() if isinstance(each, TrainingArguments)), None)
    if arguments is None or arguments.world_size == 1:
        return
    if getattr(arguments, "precompute_ref_log_probs", False):
        raise UnsupportedError(
            "precompute_ref_log_probs=True cannot be combined with own_shards=True: it computes the log probabilities"
            " of a single dataset that all ranks share. Compute them beforehand in a single process, as columns of each"
            " shard, or remove one of the two options."
        )
    if not _compat.reads_samples(trainer):
        return
    # Otherwise one rank would raise, and the others would wait for it until the timeout of their group.
    own_empty = [name for name in ("train_dataset", "eval_dataset") if _has_empty(given.get(name))]
    all_empty: list[Any] = [None] * arguments.world_size
    dist.all_gather_object(all_empty, own_empty)
    lacking = [f"{' and '.join(names)} of rank {rank}" for rank, names in enumerate(all_empty) if names]
    if lacking:
        raise UnsupportedError(
            f"{type(trainer).__name__} reads the first sample of each dataset when it is created, but"
            f" {', '.join(lacking)} is empty. Give each rank at least one sample."
        )


def _has_empty(data: Any) -> bool:
    return any(length_of(each) == 0 for each in (data.values() if isinstance(data, dict) else [data]))
