"""Steps that a finished rank runs itself on a placeholder: the placeholder batch, and the weight of its loss.

A model that lives on several ranks (experts, sharded embeddings, pipelines) needs all of them in each step: a finished
rank holds parameters that process other ranks' samples. So finished ranks mirror nothing: every rank makes every call.
A placeholder's loss gets weight zero where its backward starts, not where gradients reach the parameters: the gradients
of an expert on a finished rank come from other ranks' tokens.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError, JoinTypeError, JoinValueError, UnsupportedError
from torch_join._base.weighting import Weighting, Window, finite, loss_factor
from torch_join._compat import ddp as _compat
from torch_join._compat.modules import split_backwards
from torch_join._compat.operators import in_backward
from torch_join._schedule.active_ranks import ReadStep

_Name = Literal["last", "rows"]
Placeholder: TypeAlias = _Name | Callable[[Any], Any]  # called with the rank's last batch


_PLAIN = (str, bytes, int, float, type(None))


def check_placeholder(placeholder: Any) -> None:
    """Raise if `placeholder` is not valid.

    Raises:
        JoinTypeError: `placeholder` is neither a string nor a function.
        JoinValueError: `placeholder` is an unknown string.
    """
    names = " or ".join(map(repr, get_args(_Name)))
    if isinstance(placeholder, str) and placeholder not in get_args(_Name):
        raise JoinValueError(f"placeholder={placeholder!r} is unknown. Use {names}, or a function that takes a batch.")
    if not (isinstance(placeholder, str) or callable(placeholder)):
        raise JoinTypeError(f"placeholder must be {names}, or a function that takes a batch, not {placeholder!r}.")


def _refuse_rows(value: Any) -> NoReturn:
    raise JoinTypeError(
        f"placeholder='rows' found a {type(value).__name__} in a batch, and cannot tell which of its parts belong to"
        " which sample. Use a function that takes a batch and returns one without samples, or placeholder='last'."
    )


def without_rows(batch: Any, other: Callable[[Any], Any] = _refuse_rows) -> Any:
    """Return a batch of the same form without samples: `tensor[:0]` of each tensor, and empty lists of objects.

    Args:
        batch: Tensors, lists of one object per sample, numbers and texts, in tuples, lists and mappings.
        other: Called with each object of another type; returns its replacement. The default raises.

    Raises:
        JoinTypeError: See `other`.
    """
    if isinstance(batch, Tensor):
        return batch[:0].clone() if batch.ndim else batch
    if isinstance(batch, Mapping):
        parts = {key: without_rows(each, other) for key, each in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
        emptied = copy.copy(batch)
        emptied.update(parts)
        return emptied
    if isinstance(batch, tuple):
        rest = [without_rows(each, other) for each in batch]
        return type(batch)(*rest) if hasattr(batch, "_fields") else type(batch)(rest)
    if isinstance(batch, list):
        nested = isinstance(batch, Window) or any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in batch)
        return type(batch)(without_rows(each, other) for each in batch) if nested else []
    return batch if isinstance(batch, _PLAIN) else other(batch)


def make_placeholder(kind: Placeholder, last: Any) -> Any:
    """Return a rank's placeholder batch, made from its last batch."""
    if callable(kind):
        return kind(last)
    return last if kind == "last" else without_rows(last)


class WeighedLosses:
    """Weights losses where their backwards start, in loops where finished ranks run placeholders.

    Args:
        weighting: How the gradients of the active ranks are combined.
        world_size: The number of ranks.
        models: The models whose running statistics exclude placeholders.
        optimizers: The optimizers that step with the gradients.
        number: The number of the loop's first step.

    Attributes:
        step: Waits for the other ranks; returns which ranks have a batch in the current step, and the counts.
        number: The number of the current step.
        joined: Whether this rank has no batch in the current step; known without waiting.
        trains: Whether there was a backward in the loop.
        before: The ranks that had a batch in the previous step.
        behind: Removes the hooks that stay from the loop's end until the next loop starts.
        scale: A further factor of a batch's loss, besides its weight.
        reads_ahead: Whether user code asked for a second batch before a model of `models` saw the first.
    """

    def __init__(
        self,
        weighting: Weighting,
        world_size: int,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        number: int,
    ) -> None:
        self._weighting, self._world_size = weighting, world_size
        self._given_models, self._given_optimizers = models, optimizers
        self.step: Callable[[], ReadStep | None] = lambda: None
        self.number, self.joined, self.scale = number, False, 1.0
        self.before: Sequence[int] = range(world_size)
        self.reads_ahead = self.trains = self._has_accumulated = False
        self.behind = ExitStack()
        self._forward_in: int | None = None  # the step of the last forward of one of these models
        self._has_rows = self._holds = False
        self._held = ExitStack()  # freezes running statistics while this rank has no batch

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Wrap a loop: install the hooks on `torch.autograd.backward`, models and optimizers."""
        self.reads_ahead = False
        self._forward_in, self._holds = None, False
        self._own_backward = torch.autograd.backward
        # Without this, a compiled model would be recompiled in each step. Do not import it: that takes long.
        eager: Any = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda hook: hook
        with ExitStack() as stack:
            stack.enter_context(setting(torch.autograd, backward=self._backward))
            stack.enter_context(self._held)
            for model in self._given_models:
                stack.callback(model.register_forward_pre_hook(eager(self._before_forward)).remove)
                stack.callback(model.register_forward_hook(eager(self._after_forward)).remove)
            stack.enter_context(self._buffers_from_leader())
            for optimizer in self._given_optimizers:
                stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(split_backwards(self._refuse_zero_bubble))
            yield

    def begin(self, number: int, joined: bool, batch: Any) -> None:
        """Move to step `number`; `batch` is this rank's batch or placeholder."""
        if joined and not self._holds:
            self._hold_statistics()
        self.number, self.joined = number, joined
        self._has_rows = joined and _has_rows(batch)

    def note_asked(self) -> None:
        """Note that user code asks for a batch after the first one."""
        self.reads_ahead = self.reads_ahead or (bool(self._given_models) and self._forward_in is None)

    def end(self) -> None:
        """Give all ranks the buffers of the lowest rank active in the last step, as DDP does; all ranks call this.

        Raises:
            JoinError: This rank has not trained on its last batch yet.
        """
        if (step := self.step()) is not None:
            self.before = step.active_ranks or self.before
        weighs = len(self.before) < self._world_size or self._weighting != "world"
        if self.reads_ahead and self._forward_in is None and weighs:
            for model in self._given_models:  # it may still train on all batches; or the loop was an evaluation
                self.behind.callback(model.register_forward_pre_hook(self._refuse_training).remove)
        elif self.reads_ahead and self._forward_in != self.number and weighs:
            raise _ahead(self.number)
        self.give_buffers()

    def give_buffers(self) -> None:
        """Give all ranks the buffers of the lowest rank that had a batch in the previous step; all ranks call this."""
        if len(self.before) < self._world_size:
            with self._buffers_from_leader() as models:
                for model in models:
                    _compat.sync_buffers(model)

    @property
    def factor(self) -> float:
        """The factor of this rank's loss, for gradients that are averaged over all ranks."""
        if self.joined:
            return 0.0
        if self._weighting == "world" or (step := self.step()) is None:
            return self.scale
        active, counts = len(step.active_ranks), (step.counted, step.total)
        return self.scale * loss_factor(self._weighting, self._world_size, active, *counts)

    # ------------------------------------------------------------ hooks

    def _backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        """Start a loss's backward with this rank's factor; a loss is a root without a gradient argument.

        A backward inside another one (reentrant checkpointing) and roots with gradients (earlier pipeline stages) stay
        unchanged, since their gradients are already weighted.
        """
        if not in_backward():
            self._has_accumulated = self.trains = True
            if (factor := self.factor) != 1.0:
                if self.reads_ahead and self._forward_in is not None:
                    raise _ahead(self.number)
                tensors = [tensors] if isinstance(tensors, (Tensor, GradientEdge)) else [*tensors]
                given = (
                    [grad_tensors] if isinstance(grad_tensors, Tensor) else [*(grad_tensors or [None] * len(tensors))]
                )
                grad_tensors = [_first_gradient(*each, factor) for each in zip(tensors, given, strict=True)]
        self._own_backward(tensors, grad_tensors, *args, **kwargs)

    def _refuse_zero_bubble(self) -> None:
        """Refuse a pipeline schedule that splits backwards: no weight can be applied to the gradients it computes."""
        if self.factor != 1.0:
            raise UnsupportedError(
                "A zero-bubble pipeline schedule ran with placeholder= in a step whose loss has a weight other than"
                " 1. The schedule calls torch.autograd.grad, where Join cannot apply the weight. Use ScheduleGPipe or"
                " Schedule1F1B."
            )

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        self._forward_in = self.number
        syncs = self._has_rows and torch.is_grad_enabled()
        if syncs and any(isinstance(module, nn.SyncBatchNorm) and module.training for module in model.modules()):
            raise UnsupportedError(
                "SyncBatchNorm normalizes with the statistics of all ranks' samples, which would include the"
                " placeholder's rows. Use placeholder='rows', which has no rows, or train without placeholder=."
            )

    def _refuse_training(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            raise _ahead(self.number)

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._world_size > 1:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._check_gradient, self.number))  # type: ignore[no-untyped-call]

    def _check_gradient(self, number: int, gradient: Tensor | None) -> Tensor | None:
        """Check the gradient of a model's output, before other ranks take part in the model's backward."""
        if number != self.number and (self.joined or self._weighting != "world"):
            raise _ahead(self.number)
        if gradient is None:  # from DDP, for an output that the loss does not need
            return None
        if self.joined and self._has_rows and gradient.isnan().any():
            raise JoinError(
                "The placeholder's loss has zero weight, but its gradients are NaN (0 times NaN) and would reach all"
                " ranks. The placeholder contains a NaN, or its loss is divided by a count of 0. Return another"
                " placeholder, or divide by `max(count, 1)`."
            )
        return finite(gradient) if not self.joined and self.factor == 0 else None

    def _after_step(self, *_: Any) -> None:
        self._has_accumulated = False

    @property
    def holds_gradients(self) -> bool | None:
        """Whether there are gradients that no given optimizer has used yet; `None` (unknown) without an optimizer."""
        if not (self._has_accumulated and self._given_optimizers):
            return None if self._has_accumulated else False
        groups = [group for optimizer in self._given_optimizers for group in optimizer.param_groups]
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    @contextmanager
    def _buffers_from_leader(self) -> Iterator[list[DistributedDataParallel]]:
        found = [each for each in self._given_models if isinstance(each, DistributedDataParallel)]
        found = [each for each in found if _compat.broadcasts_buffers(each)]
        with ExitStack() as stack:
            for model in found:
                stack.enter_context(_compat.buffers_from(model, self._leader))
            yield found

    def _leader(self, ranks: Sequence[int]) -> int:
        """Return the index in `ranks` of the lowest rank that had a batch in the previous step, for its buffers."""
        return next((place for place, rank in enumerate(ranks) if rank in self.before), 0)

    def _hold_statistics(self) -> None:
        """Stop updating running statistics: a rank without a batch has nothing to add to them."""
        self._holds = True
        for model in self._given_models:
            for module in model.modules():
                if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm):
                    self._held.enter_context(setting(module, track_running_stats=False))


def _first_gradient(root: Any, given: Tensor | None, factor: float) -> Tensor | None:
    if given is not None:
        return given
    if not isinstance(root, Tensor):
        raise UnsupportedError(
            "With placeholder=, a backward from a GradientEdge needs a gradient. Pass one, or use the tensor."
        )
    if root.numel() != 1:
        return None  # torch raises
    return torch.full_like(root, factor)


def _ahead(step: int) -> JoinError:
    return JoinError(
        f"The batch of step {step} was requested before the backward of the previous step, usually by a prefetcher"
        " around the loop, so Join cannot tell which batch the loss belongs to. Put the prefetcher inside:"
        " join.batches(prefetcher(loader)). Request the next batch after the backward."
    )


def _has_rows(batch: Any) -> bool:
    """Whether a batch has samples, or objects that may have samples."""
    return any(
        bool(len(leaf)) if isinstance(leaf, Tensor) and leaf.ndim else not isinstance(leaf, (*_PLAIN, Tensor))
        for leaf in tree_leaves(batch)
    )
