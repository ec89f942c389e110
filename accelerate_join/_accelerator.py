"""Accelerate's `Accelerator` with the method replaced, and what an accelerator does differently in the context."""

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from accelerate_join import _batches, _compat, _context
from accelerate_join._loaders import remainder
from torch_join import Join, JoinError, UnsupportedError, Weighting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from accelerate_join._context import AcceleratorJoin
    from accelerate_join._gather import Operations

T = TypeVar("T")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's, but for `join_uneven_inputs`."""

    def join_uneven_inputs(
        self,
        joinables: Any = None,
        even_batches: bool | None = False,
        *,
        weighting: Weighting = "world",
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> AbstractContextManager[Join]:
        """Train on uneven inputs, exactly: see `accelerate_join.join_uneven_inputs`.

        Args:
            joinables: Whatever takes part besides all that was prepared.
            even_batches: Overrides the setting of prepared loaders within; `None` leaves it as it is.
            weighting: How the gradients of the active ranks are combined.
            throw_on_early_termination: Whether to raise on all ranks when the first one runs out of inputs.
            **kwargs: What else `torch_join.Join` takes.
        """
        _batches.finish(self)
        return _context.join_uneven_inputs(
            self,
            joinables,
            even_batches,
            weighting=weighting,
            throw_on_early_termination=throw_on_early_termination,
            **kwargs,
        )

    @overload
    def join_batches(self, loader: DataLoader[T], **kwargs: Any) -> "Iterable[T]": ...
    @overload
    def join_batches(self, loader: "Iterable[T]", **kwargs: Any) -> "Iterable[T]": ...
    def join_batches(self, loader: "Iterable[T]", **kwargs: Any) -> "Iterable[T]":
        """Go through the batches of `loader`, in a context of its own: see `accelerate_join.join_batches`.

        Args:
            loader: One that was prepared, or anything else that can be iterated over.
            **kwargs: What `join_uneven_inputs` takes.
        """
        return _batches.join_batches(self, loader, **kwargs)

    def end_training(self) -> None:
        """Finish a loop over `join_batches` that was left by `break`, and do what Accelerate's method does."""
        _batches.finish(self)
        super().end_training()


class _Joining:
    """What an accelerator does differently in the context, before its own class."""

    _operations: ClassVar["Operations"]

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        with self._operations.gathering_for_metrics():
            return super().gather_for_metrics(*args, **kwargs)  # type: ignore[misc]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._operations.save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        self._operations.load_state(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._operations.log(*args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        with self._operations.for_main():
            super().print(*args, **kwargs)  # type: ignore[misc]

    def save(self, *args: Any, **kwargs: Any) -> None:
        with self._operations.for_main():
            super().save(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._operations.for_main():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        raise JoinError(
            "A model was prepared inside of join_uneven_inputs, which cannot serve it any more. Prepare all models"
            " before the context begins."
        )

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> Any:
        raise UnsupportedError(
            "trigger_sync_in_backward makes a model sync in a backward whose forward was under no_sync, which ranks"
            " that have joined cannot follow. Run the last forward of a window outside of no_sync, as"
            " accelerator.accumulate does."
        )


@contextmanager
def joining(accelerator: accelerate.Accelerator, join: "AcceleratorJoin") -> "Iterator[None]":
    """Within, `accelerator`, and all that know the gradient state, know of the other ranks."""

    def end_of_dataloader(state: GradientState) -> bool:
        """Whether this is the last step of the longest rank."""
        loader = state.active_dataloader
        return loader is not None and loader is join.loader and join.at_last_step

    def remainder_of(state: GradientState) -> int:
        """The number of samples in the last step, where it holds others that are there for the second time."""
        return -1 if state.active_dataloader is None else remainder(state.active_dataloader)

    own = type(accelerator)
    accelerator.__class__ = type(own.__name__, (_Joining, own), {"_operations": join.operations})
    try:
        with (
            _compat.replaced(
                GradientState, end_of_dataloader=property(end_of_dataloader), remainder=property(remainder_of)
            ),
            _compat.replaced(LocalSGD, step=_refuse_local_sgd),
        ):
            yield
    finally:
        accelerator.__class__ = own


def _refuse_local_sgd(*_: Any) -> None:
    raise UnsupportedError(
        "LocalSGD averages parameters every few steps, and the steps that a rank has made alone since the last average"
        " are lost when it runs out of batches. Give all ranks equally many batches, or use DistributedDataParallel's"
        " averaging of gradients."
    )
