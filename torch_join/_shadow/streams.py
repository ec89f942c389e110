"""The order of streams on a device, where autograd sees to none: of gradients that do not come.

The contract relied on: autograd runs a node on the stream that was current where it was made, with the node's hooks;
at the end of a backward the current stream waits for those of all nodes that add to gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torch_join._base.attributes import setting


def accumulators(parameters: Sequence[Tensor]) -> list[Any]:
    """Return the nodes that add to the gradients of parameters, of frozen ones too; DDP keeps them."""
    nodes = []
    for parameter in parameters:
        with setting(parameter, requires_grad=True):
            nodes.append(get_gradient_edge(parameter).node)
    return nodes


@contextmanager
def streams_waiting(nodes: Sequence[Any]) -> Iterator[None]:
    """Have what adds to gradients wait, on its stream, for what the current stream has been given until then.

    That stream is as a rule the one which was current where DDP was made. Autograd has it wait for gradients that come,
    and not where none does: then DDP would clear a bucket there that the last step still averages.

    Args:
        nodes: What adds to them, see `accumulators`.
    """
    current = {device: torch.accelerator.current_stream(device) for device in {n.variable.device for n in nodes}}

    def wait(device: torch.device, _: Any) -> None:
        if (own := torch.accelerator.current_stream(device)) != current[device]:
            own.wait_stream(current[device])

    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.register_prehook(partial(wait, node.variable.device)).remove)
        yield
