"""Orders a device's streams if no gradient comes, since autograd orders them only for gradients that come.

This relies on two facts. Autograd runs a node, with its hooks, on the stream that was current when it was made. At the
end of a backward, the current stream waits for the streams of all nodes that accumulate gradients.
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
    but not if none comes: then DDP would clear a bucket there that the last step is still averaging.

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
