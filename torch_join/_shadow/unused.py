"""A shadow's backward under `find_unused_parameters=True`, in which this rank uses no parameter.

DDP counts a parameter as used on a rank if its hook fires there while it has a gradient, also in a backward without a
sync. The count lasts until the next sync. DDP averages parameters outside a forward's graph without counting them. So a
shadow's graph leads to one parameter only, and to the sparse ones, which DDP treats as used. If that one has a zero
gradient, DDP counts it as used and gives all ranks zeros. The active ranks have zeros too, unless it is this rank's
share of an accumulation. (A backward in pieces leads to all parameters. There a gradient that is not this rank's share
is equal on all ranks, or missing, and counting it as used changes nothing.)

A parameter that was counted and then cleared would still be reported as used, and DDP raises if its gradient is `None`
by then ("undefined, but still allreduced"). So such parameters get a zero gradient during the backward, and this rank
reports them as unused.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_join._compat import ddp as _compat
from torch_join._compat.c10d import changing_all_reduces


@contextmanager
def using_nothing(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], connected: Sequence[Tensor], accumulated: bool
) -> Iterator[None]:
    """Wrap the backward of a shadow.

    Args:
        ddp: The model.
        parameters: The parameters that DDP averages, in its order.
        connected: The parameters in the graph of a shadow's forward: one, and the sparse ones.
        accumulated: Whether this rank may have used parameters without a sync since the last one.
    """
    sparse = {*map(id, connected[1:])}
    absent = [index for index, p in enumerate(parameters) if p.grad is None and p.requires_grad and id(p) not in sparse]
    reports = accumulated and ddp.require_backward_grad_sync and bool(absent)
    used = [False] * len(parameters)
    try:
        with ExitStack() as stack:
            if reports:
                for index in absent:
                    parameters[index].grad = torch.zeros_like(parameters[index])
                stack.enter_context(_reporting_unused(parameters, absent))
            yield
        used = _compat.used_parameters(ddp) if reports else used
    finally:
        for index in absent if reports else ():
            if len(used) == len(parameters) and not used[index]:
                parameters[index].grad = None


def _reporting_unused(parameters: Sequence[Tensor], unused: Sequence[int]) -> AbstractContextManager[None]:
    def change(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dtype == torch.int32 and tensor.numel() == len(parameters):
                tensor[list(unused)] = 0

    return changing_all_reduces(change)
