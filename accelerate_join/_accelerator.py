"""What an accelerator does differently in the context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import GradientState

from accelerate_join import _compat
from accelerate_join._loaders import remainder
from accelerate_join._operations import Operations
from accelerate_join._protocol import JoinContext
from torch_join import JoinError, UnsupportedError


class _InContext:
    """What an accelerator does differently in the context, before its own class."""

    _operations: ClassVar[Operations]

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
        with self._operations.acting_for_main_process():
            super().print(*args, **kwargs)  # type: ignore[misc]

    def save(self, *args: Any, **kwargs: Any) -> None:
        with self._operations.acting_for_main_process():
            super().save(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._operations.save_model(*args, **kwargs)

    def get_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._operations.get_state_dict(*args, **kwargs)

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
def class_replaced(accelerator: accelerate.Accelerator, context: JoinContext, operations: Operations) -> Iterator[None]:
    """Within, the methods of `accelerator` and its gradient state take the other ranks into account."""

    def end_of_dataloader(state: GradientState) -> bool:
        """Whether this is the last step of the longest rank."""
        loader = state.active_dataloader
        return loader is not None and loader is context.loader and context.at_last_step

    def remainder_of(state: GradientState) -> int:
        """The number of samples in the last step, where it holds others that are there for the second time."""
        return -1 if state.active_dataloader is None else remainder(state.active_dataloader)

    own = type(accelerator)
    accelerator.__class__ = type(own.__name__, (_InContext, own), {"_operations": operations})
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
