"""The zero-gradient pass: a DDP model's shadow on a rank that has no batch.

This relies on three facts. `DistributedDataParallel.forward` runs `self.module`, and besides it only buffer broadcasts,
the bucket rebuild and `prepare_for_backward`. Its reducer learns of a gradient from a hook on the parameter's
`AccumulateGrad` node, which autograd runs even when the incoming gradient is undefined. An undefined gradient counts as
zero and as *unused*. So this runs the real wrapper around a stand-in whose graph gives every parameter an undefined
gradient: DDP issues its own collectives in its own order, and leaves the average in `param.grad`.

Returning zeros instead would make every parameter count as used under `find_unused_parameters=True`, and momentum and
weight decay would move parameters that no rank used.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._compat import ddp as _compat
from torch_join._compat.operators import changing_all_reduces
from torch_join._shadow.buffer_news import BufferNews
from torch_join._shadow.first_iteration import FirstIteration
from torch_join._shadow.reach import leads_to
from torch_join._shadow.zero_gradient import zero_gradient


class ModelShadow:
    """Runs in place of a forward of `ddp` on a rank without a batch.

    Args:
        ddp: The model, which must not have run yet if it has `static_graph=True`.
        watches: Whether to watch the first iteration at once.

    Attributes:
        accumulated: Whether this rank has run a backward without a sync since the last one with a sync.
        first: The model's first iteration.
        news: The announced forms of the model's buffers.
        parameters: The parameters that DDP averages, in its order.

    Raises:
        JoinTypeError: `ddp` is not a `DistributedDataParallel`.
        UnsupportedError: The model uses a feature whose collectives cannot be shadowed.
    """

    def __init__(self, ddp: DistributedDataParallel, watches: bool = True) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinTypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}.")
        if (feature := _compat.unsupported_ddp_feature(ddp)) is not None:
            raise UnsupportedError(f"DistributedDataParallel with {feature} does not support uneven inputs.")
        self.ddp = ddp
        self.accumulated = False
        self._placeholder = _PlaceholderModule()  # one for all steps
        self.news = BufferNews()
        self.parameters = _compat.averaged_parameters(ddp)
        self._ids = frozenset(map(id, self.parameters))
        self._frozen_at_first = [ref(p) for p in ddp.module.parameters() if id(p) not in self._ids]
        embeddings = [m for m in ddp.module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        self.sparse = frozenset(id(p) for m in embeddings for p in m.parameters(recurse=False))
        # The nodes that accumulate gradients on a device; empty during a shadow's step.
        self._waiting = accumulators([p for p in self.parameters if p.device.type != "cpu"])
        self.first = FirstIteration(ddp, self.parameters)
        if watches:
            self.first.watch()

    @contextmanager
    def step(self, shadow: bool) -> Iterator[None]:
        """Wrap a whole step, forward and backward, on a joined rank if `shadow`, else on an active one."""
        # The user's hooks expect a gradient, but a shadow has none.
        parameters = self.parameters if shadow else ()
        every = [h for p in parameters for h in (_compat.backward_hooks(p), _compat.post_accumulate_hooks(p))]
        muted = [(hooks, dict(hooks)) for hooks in every if hooks]
        for hooks, _ in muted:
            hooks.clear()
        if waiting := self._waiting if shadow else []:
            self._waiting = []
        try:
            with streams_waiting(waiting):
                yield
        finally:
            self._waiting = waiting or self._waiting
            for hooks, kept in muted:
                hooks.update(kept)
            self.first.finish_watching()

    def forward(self) -> Tensor:
        """Run the wrapper's forward without an input.

        Returns:
            A scalar zero. Its backward gives DDP an undefined gradient for every parameter that is not frozen; if all
            are frozen, it has no backward.

        Raises:
            UnsupportedError: A parameter fires several times per iteration under `static_graph=True`.
        """
        self.first.finish_watching()
        self.first.guess()
        with self._with_placeholder(lambda *_: self.zero()):
            # Not by a call, which would run the user's hooks. With `device_ids`, DDP needs a tensor.
            zero: Tensor = self.ddp.forward(  # type: ignore[no-untyped-call]
                torch.empty(0, device=self.parameters[0].device)
            )
        return zero

    def forward_again(self) -> Tensor:
        """Return a new result of `forward`, if parameters have been frozen or unfrozen since it ran."""
        with torch.enable_grad():
            zero = self.zero()
            if self._finds_unused:
                _compat.expect_gradients(self.ddp, zero)
        return zero

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward of a result of `forward` or `no_loss_output`: this rank contributes nothing new."""
        with self.around_backward(in_pieces=False):
            run()

    @contextmanager
    def around_backward(self, in_pieces: bool) -> Iterator[None]:
        """Wrap a backward; or, if `in_pieces`, the backwards of several `zero_of` that make up one step's backward."""
        with ExitStack() as stack:
            stack.enter_context(self.step(shadow=True))
            if self._finds_unused:
                if in_pieces:  # else parameters outside the forward's graph would count as ready at once
                    with torch.enable_grad():
                        _compat.expect_gradients(self.ddp, self.zero_of(self.firing))
                stack.enter_context(_using_nothing(self.ddp, self.parameters, self._connected(), self.accumulated))
            yield
        if self.ddp.require_backward_grad_sync:
            self.accumulated = False

    def unreached(self) -> list[int]:
        """Return the parameters, by place, that DDP counts as ready at the start of the current backward."""
        if not self._finds_unused:
            return []
        return [place for place, p in enumerate(self.parameters) if not _compat.will_accumulate(p)]

    def no_loss_output(self) -> Tensor:
        """Return a replacement for the output of a forward without a loss, like the result of `forward`.

        Raises:
            UnsupportedError: This is the first iteration under `static_graph=True`; or see `forward`.
        """
        if self.first.is_now:
            raise UnsupportedError(
                "The first step under static_graph=True had no loss, but that step decides which parameters take part"
                " in all later steps. Return a loss, or use static_graph=False."
            )
        return self.zero()

    def is_reached_by(self, loss: Tensor) -> bool:
        """Whether a backward of `loss` may reach a parameter that DDP averages, and so take part in averaging."""
        return leads_to(loss, lambda variable: id(variable) in self._ids)

    def completing(
        self, complete: Callable[[Any], Any], run: Callable[..., Any] | None = None
    ) -> AbstractContextManager[None]:
        """Change forwards of the wrapper inside: `complete` receives the inner module's output and may replace it.

        Args:
            complete: Takes the inner module's output, and returns the wrapper's.
            run: Run in place of the inner module, which it may call.
        """
        module = self.ddp.module

        def forward(*args: Any, **kwargs: Any) -> Any:
            _compat.wrap(self.ddp, module)  # user code must find it there
            return complete((run or module)(*args, **kwargs))

        return self._with_placeholder(forward)

    @property
    def inner(self) -> nn.Module:
        """The wrapped module, also while a placeholder stands in for it."""
        module: nn.Module = self.ddp.module
        return module.place[0] if isinstance(module, _PlaceholderModule) else module

    @contextmanager
    def _with_placeholder(self, forward: Callable[..., Any]) -> Iterator[None]:
        module, placeholder = self.ddp.module, self._placeholder
        vars(placeholder)["place"] = module, forward
        _compat.wrap(self.ddp, placeholder)
        try:
            yield
        finally:
            _compat.wrap(self.ddp, module)
            del vars(placeholder)["place"]

    def zero(self) -> Tensor:
        """Return a scalar zero for a separate backward, when DDP's reducer is prepared without a forward."""
        return self._zero_of(self._connected())

    def zero_of(self, places: Sequence[int]) -> Tensor:
        """Return a scalar zero whose backward gives DDP undefined gradients of these parameters, in this order."""
        return self._zero_of([self.parameters[place] for place in reversed(places)])

    def _zero_of(self, parameters: Sequence[Tensor]) -> Tensor:
        if not parameters:
            return torch.zeros((), device=self.parameters[0].device)
        sparse = [id(p) in self.sparse for p in parameters]
        if _compat.has_rebuilt_buckets(self.ddp):
            return zero_gradient(parameters, sparse, None)
        # DDP orders its buckets, for good, by rank 0's first gradients. These usually come in the reverse order of the
        # parameters. In a chain, backward reaches the last one first.
        zero = None
        for parameter, is_sparse in zip(parameters, sparse, strict=True):
            zero = zero_gradient([parameter], [is_sparse], zero)
        assert zero is not None
        return zero

    @property
    def _finds_unused(self) -> bool:
        return bool(self.ddp.find_unused_parameters) and not self.ddp.static_graph

    def _connected(self) -> list[Tensor]:
        """Return the parameters in the graph of a shadow's forward."""
        parameters = [self.parameters[place] for place in self.firing]
        if not self._finds_unused:
            return parameters
        dense = [p for p in parameters if id(p) not in self.sparse]
        sparse = [p for p in parameters if id(p) in self.sparse]
        return [*dense[:1], *sparse]

    @property
    def firing(self) -> list[int]:
        """The parameters, by place, for which DDP expects a gradient in a backward."""
        return [place for place, p in enumerate(self.parameters) if p.requires_grad and self.first.fires(p)]

    @property
    def frozen(self) -> list[int]:
        """The parameters, by place, that require no gradient now."""
        return [place for place, p in enumerate(self.parameters) if not p.requires_grad]

    def freeze(self, places: Sequence[int]) -> None:
        """Make these parameters require no gradient, and all others require one, as on a rank that has a batch."""
        frozen = frozenset(places)
        for place, parameter in enumerate(self.parameters):
            parameter.requires_grad_(place not in frozen)

    def sync_buffers(self, src: int, keeps: bool = False) -> None:
        """Broadcast the model's buffers from rank `src`, as DDP does from rank 0; if `keeps`, this rank's own stay."""
        if not self.ddp.broadcast_buffers:
            return
        named = self.ddp.module.named_buffers()
        # Through `.data`, as DDP does, hidden from autograd: a graph whose backward has not run may have saved them.
        buffers = [b.data for name, b in named if name not in self.ddp.parameters_to_ignore]
        buffers = [buffer.clone() for buffer in buffers] if keeps else buffers
        if buffers:
            _compat.broadcast_coalesced(self.ddp.process_group, buffers, self.ddp.broadcast_bucket_size, src)

    def unfrozen(self, optimizers: Iterable[Any]) -> list[str]:
        """Return the names of trained parameters that DDP does not average: once frozen, or new and stepped."""
        named, ignored = self.ddp.module.named_parameters(), self.ddp.parameters_to_ignore
        found = {name: p for name, p in named if p.requires_grad and id(p) not in self._ids and name not in ignored}
        if not found:
            return []
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        frozen = [p for ref in self._frozen_at_first if (p := ref()) is not None]
        return [name for name, p in found.items() if id(p) in stepped or any(p is one for one in frozen)]


class _PlaceholderModule(nn.Module):
    """Takes the inner module's place for one forward of the wrapper.

    Attributes:
        place: The inner module (in a tuple, so that it does not become a submodule), and the function to run.
    """

    place: tuple[nn.Module, Callable[..., Any]]

    # Not `forward`, around which a call runs global module hooks.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.place[1](*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.place[0].named_buffers(*args, **kwargs)


@contextmanager
def _using_nothing(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], connected: Sequence[Tensor], accumulated: bool
) -> Iterator[None]:
    """Wrap a shadow's backward under `find_unused_parameters=True`, in which this rank uses no parameter.

    DDP counts a parameter as used on a rank if its hook fires there while it has a gradient, also in a backward without
    a sync. The count lasts until the next sync. DDP averages parameters outside a forward's graph without counting
    them. So a shadow's graph leads to one parameter only, and to the sparse ones, which DDP treats as used. If that one
    has a zero gradient, DDP counts it as used and gives all ranks zeros. The active ranks have zeros too, unless it is
    this rank's share of an accumulation. (A backward in pieces leads to all parameters. There a gradient that is not
    this rank's share is equal on all ranks, or missing, and counting it as used changes nothing.)

    A parameter that was counted and then cleared would still be reported as used, and DDP raises if its gradient is
    `None` by then ("undefined, but still allreduced"). So such parameters get a zero gradient during the backward, and
    this rank reports them as unused.

    Args:
        ddp: The model.
        parameters: The parameters that DDP averages, in its order.
        connected: The parameters in the graph of a shadow's forward: one, and the sparse ones.
        accumulated: Whether this rank may have used parameters without a sync since the last one.
    """
    sparse = {*map(id, connected[1:])}
    absent = [index for index, p in enumerate(parameters) if p.grad is None and p.requires_grad and id(p) not in sparse]
    if not (accumulated and ddp.require_backward_grad_sync and absent):
        yield
        return

    def report_unused(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype == torch.int32 and tensor.numel() == len(parameters):
                tensor[absent] = 0

    used = [False] * len(parameters)
    try:
        for index in absent:
            parameters[index].grad = torch.zeros_like(parameters[index])
        with changing_all_reduces(report_unused):
            yield
        used = _compat.used_parameters(ddp)
    finally:
        for index in absent:
            if len(used) == len(parameters) and not used[index]:
                parameters[index].grad = None


# ---------------------------------------------------------------- streams of a device


def accumulators(parameters: Sequence[Tensor]) -> list[Any]:
    """Return the nodes that accumulate the gradients of parameters, also of frozen ones; DDP keeps them alive."""
    nodes = []
    for parameter in parameters:
        with setting(parameter, requires_grad=True):
            nodes.append(get_gradient_edge(parameter).node)
    return nodes


@contextmanager
def streams_waiting(nodes: Sequence[Any]) -> Iterator[None]:
    """Make nodes that accumulate gradients wait, on their streams, for the work of the current stream so far.

    Their stream is usually the one that was current when DDP was made. Autograd makes it wait for gradients that come,
    but not if none comes: then DDP would clear a bucket there that the last step is still averaging. This relies on two
    facts. Autograd runs a node, with its hooks, on the stream that was current when it was made. At the end of a
    backward, the current stream waits for the streams of all nodes that accumulate gradients.

    Args:
        nodes: The nodes, see `accumulators`.
    """
    current = {device: torch.accelerator.current_stream(device) for device in {n.variable.device for n in nodes}}

    def wait(device: torch.device, _: Any) -> None:
        if (own := torch.accelerator.current_stream(device)) != current[device]:
            own.wait_stream(current[device])

    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.register_prehook(partial(wait, node.variable.device)).remove)
        yield
