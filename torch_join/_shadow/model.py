"""The zero-gradient pass: a DDP model's shadow on a rank that has no batch.

The contract relied on: `DistributedDataParallel.forward` runs `self.module` and otherwise only
plumbing (buffer broadcast, bucket rebuild, `prepare_for_backward`); its reducer hears of a gradient
from a hook on the parameter's `AccumulateGrad` node, which autograd runs even when the incoming
gradient is undefined; an undefined gradient counts as zero and as *unused*. So the real wrapper is
run around a stand-in whose graph leads to every parameter with undefined gradients: DDP issues its
own collectives in its own order, and leaves the average in `param.grad`.

Returning zeros instead would make every parameter count as used under `find_unused_parameters=True`,
and momentum and weight decay would move parameters that no rank used.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_join._base import compat as _compat
from torch_join._base.errors import JoinError, JoinTypeError, UnsupportedError
from torch_join._shadow.unused import using_nothing
from torch_join._shadow.zero_gradient import zero_gradient

# Which parameters fired in a model's first iteration, and how often: models outlive their shadows.
_first_iterations: WeakKeyDictionary[DistributedDataParallel, dict[int, int]] = WeakKeyDictionary()
# The models whose first iteration was a shadow here, and how often they fired on a rank that had a batch.
_guessed: WeakKeyDictionary[DistributedDataParallel, list[int] | None] = WeakKeyDictionary()


class ModelShadow:
    """What a rank without a batch runs in place of a forward of `ddp`.

    Args:
        ddp: The model, which must not have run yet where it has `static_graph=True`.
        watches: Whether to `watch` at once.

    Raises:
        JoinTypeError: `ddp` is not a `DistributedDataParallel`.
        UnsupportedError: The model uses something whose collectives cannot be shadowed.

    """

    def __init__(self, ddp: DistributedDataParallel, watches: bool = True) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinTypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}.")
        if (feature := _compat.unsupported_ddp_feature(ddp)) is not None:
            raise UnsupportedError(f"DistributedDataParallel with {feature} cannot train on uneven inputs yet.")
        if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.module.modules()):
            raise UnsupportedError(
                "SyncBatchNorm issues collectives in forward and backward that a rank without a batch cannot"
                " take part in. Use BatchNorm (its buffers are kept in step) or GroupNorm."
            )
        self.ddp = ddp
        self.accumulated = False  # this rank has run a backward without a sync since the last one with
        self._stand_in = _StandIn()  # one, since it is made use of in each step
        self.parameters = _compat.averaged_parameters(ddp)
        self.sparse = frozenset(
            id(p) for m in ddp.module.modules() if _compat.is_sparse_embedding(m) for p in m.parameters(recurse=False)
        )
        # Under `static_graph` the first iteration decides how often each parameter fires in all others.
        self._fired: dict[int, int] | None = _first_iterations.setdefault(ddp, {}) if ddp.static_graph else None
        self._watches: list[RemovableHandle] = []
        if watches:
            self.watch()

    @contextmanager
    def step(self, shadow: bool) -> Iterator[None]:
        """Put around a whole step, forward and backward, in which this rank is a shadow or is not."""
        # The user's hooks expect a gradient, and here there is none.
        every = [h for p in self.parameters for h in (_compat.backward_hooks(p), _compat.post_accumulate_hooks(p))]
        muted = [(hooks, dict(hooks)) for hooks in every if hooks] if shadow else []
        for hooks, _ in muted:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, its in muted:
                hooks.update(its)
            self.settle()

    def watch(self) -> None:
        """Watch which parameters fire in the first iteration, where it decides about all others."""
        if self._fired == {}:
            self._watches += [self._watch(p, self._fired) for p in self.parameters if p.requires_grad]

    def unwatch(self) -> None:
        """Watch no more: two who did would count twice."""
        while self._watches:
            self._watches.pop().remove()

    def settle(self) -> None:
        """Stop watching which parameters fire, once the first iteration has shown it."""
        if self._fired:
            self.unwatch()

    def forward(self) -> Tensor:
        """Run the wrapper's forward on nothing.

        Returns:
            A scalar zero. Its backward hands DDP an undefined gradient for every parameter.

        Raises:
            UnsupportedError: A parameter fires several times per iteration under `static_graph=True`.

        """
        self.settle()
        if self._fired == {}:
            _guessed[self.ddp] = None
        with self._standing_in(lambda *_: self.zero()):
            # Not by a call, which would run the user's hooks. With `device_ids` DDP cannot do without a tensor.
            zero: Tensor = self.ddp.forward(  # type: ignore[no-untyped-call]
                torch.empty(0, device=self.parameters[0].device)
            )
        return zero

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward of what `forward` or `no_loss` has returned: this rank contributes nothing new."""
        with ExitStack() as stack:
            stack.enter_context(self.step(shadow=True))
            if self._finds_unused:
                stack.enter_context(using_nothing(self.ddp, self.parameters, self._connected(), self.accumulated))
            run()
        if self.ddp.require_backward_grad_sync:
            self.accumulated = False

    def no_loss_output(self) -> Tensor:
        """Return the output of a forward that has come to no loss, in place of it: what `forward` returns.

        Raises:
            UnsupportedError: It is the first iteration under `static_graph=True`, or see `forward`.
        """
        if self._fired == {}:
            raise UnsupportedError(
                "A step without a loss cannot be the first one under static_graph=True, since that one decides which"
                " parameters take part in all others. Return a loss, or use static_graph=False."
            )
        return self.zero()

    @contextmanager
    def completing(self, complete: Callable[[Any], Any]) -> Iterator[None]:
        """Put around a forward of the wrapper, whose inner module's output `complete` gets and may replace."""
        module = self.ddp.module

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.ddp.module = module  # the user's code must find it there
            return complete(module(*args, **kwargs))

        with self._standing_in(forward):
            yield

    @property
    def inner(self) -> nn.Module:
        """The wrapped module, also while something stands in for it."""
        module: nn.Module = self.ddp.module
        return module.place[0] if isinstance(module, _StandIn) else module

    @contextmanager
    def _standing_in(self, forward: Callable[..., Any]) -> Iterator[None]:
        module, stand_in = self.ddp.module, self._stand_in
        stand_in.place = module, forward
        self.ddp.module = stand_in
        try:
            yield
        finally:
            self.ddp.module = module
            del stand_in.place

    def zero(self) -> Tensor:
        """Return a scalar zero for a backward of its own, where DDP's reducer is made ready without a forward."""
        parameters = self._connected()
        sparse = [id(p) in self.sparse for p in parameters]
        if _compat.has_rebuilt_buckets(self.ddp):
            return zero_gradient(parameters, sparse, None)
        # DDP takes the order of rank 0's first gradients for that of its buckets, for good: as a rule the reverse
        # of the parameters'. Of a chain, backward comes to the last first.
        zero = None
        for parameter, is_sparse in zip(parameters, sparse, strict=True):
            zero = zero_gradient([parameter], [is_sparse], zero)
        assert zero is not None
        return zero

    @property
    def _finds_unused(self) -> bool:
        return bool(self.ddp.find_unused_parameters) and not self.ddp.static_graph

    def _connected(self) -> list[Tensor]:
        """Return the parameters that the graph of a shadow's forward leads to."""
        parameters = [p for p in self.parameters if p.requires_grad and self._fires(p)]
        if not self._finds_unused:
            return parameters
        dense = [p for p in parameters if id(p) not in self.sparse]
        sparse = [p for p in parameters if id(p) in self.sparse]
        return [*dense[:1], *sparse]

    def sync_buffers(self, src: int, keeps: bool = False) -> None:
        """Broadcast the model's buffers from rank `src`, as DDP would from rank 0; who `keeps` its own only helps."""
        if not self.ddp.broadcast_buffers:
            return
        named = self.ddp.module.named_buffers()
        # As DDP does it, past autograd's eyes: a graph that waits for its backward may have saved them.
        buffers = [b.data for name, b in named if name not in self.ddp.parameters_to_ignore]
        buffers = [buffer.clone() for buffer in buffers] if keeps else buffers
        if buffers:
            _compat.broadcast_coalesced(self.ddp.process_group, buffers, self.ddp.broadcast_bucket_size, src)

    @property
    def fired(self) -> list[int] | None:
        """How often each parameter got a gradient in the first iteration under `static_graph=True`, if known here."""
        return self._times() if self._fired and self.ddp not in _guessed else None

    def note_fired(self, theirs: list[int] | None) -> None:
        """Note what another rank knows, if this one does not: in a shadow, all parameters get one."""
        if theirs is not None and self.ddp in _guessed:
            _guessed[self.ddp] = theirs

    @property
    def shadow_only(self) -> bool:
        """Whether this rank cannot run the model itself; see `check_fired`."""
        return self._fired is not None and _guessed.get(self.ddp) not in (None, self._times())

    def check_fired(self) -> None:
        """Make sure that this rank can run the model itself.

        Raises:
            JoinError: DDP would wait for parameters that get no gradient.
        """
        mine, theirs = self._times(), _guessed.get(self.ddp)
        if not self.shadow_only or theirs is None:
            return
        where = next(index for index, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        raise JoinError(
            "static_graph=True fixes in a model's first iteration how many gradients each parameter gets in all others,"
            f" and the ranks do not agree: parameter {where}, of shape {tuple(self.parameters[where].shape)}, got"
            f" {mine[where]} on this rank and {theirs[where]} on another. A rank that has no batch in the first"
            " iteration takes every parameter for used once. Give each rank a batch in the first iteration, freeze"
            " parameters that are never used before wrapping the model (requires_grad_(False)), or use"
            " static_graph=False with find_unused_parameters=True."
        )

    def _times(self) -> list[int]:
        return [(self._fired or {}).get(id(p), 0) for p in self.parameters]

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that require a gradient and did not when the model was wrapped."""
        known = {*map(id, self.parameters)}
        named = self.ddp.module.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        return [name for name in new if name not in self.ddp.parameters_to_ignore]

    def _fires(self, parameter: Tensor) -> bool:
        if not self._fired:
            return True
        times = self._fired.get(id(parameter), 0)
        if times > 1:
            raise UnsupportedError(
                f"A parameter of shape {tuple(parameter.shape)} receives {times} gradients per backward under"
                " static_graph=True (reentrant activation checkpointing does this), which a rank without a batch"
                " cannot repeat. Use checkpointing with use_reentrant=False, or static_graph=False."
            )
        return times == 1

    def _watch(self, parameter: Tensor, fired: dict[int, int]) -> RemovableHandle:
        def count(*_: Any) -> None:
            fired[id(parameter)] = fired.get(id(parameter), 0) + 1

        return get_gradient_edge(parameter).node.register_prehook(count)


class _StandIn(nn.Module):
    """Takes the inner module's place for one forward of the wrapper.

    Attributes:
        place: That module (in a tuple, so that it does not become a submodule), and what to run.
    """

    place: tuple[nn.Module, Callable[..., Any]]

    # Not `forward`, around which a call runs global module hooks.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.place[1](*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.place[0].named_buffers(*args, **kwargs)
