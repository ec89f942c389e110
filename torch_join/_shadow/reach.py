"""Whether a loss depends on a model's parameters: a constant, returned to skip a batch, does not.

The backward of a constant never reaches the model. DDP sees no gradient, so it neither averages nor raises, while the
other ranks wait for this one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction


def leads_to(loss: Tensor, wanted: Callable[[Tensor], bool] = lambda v: isinstance(v, nn.Parameter)) -> bool:
    """Whether a backward of `loss` may reach a variable that is `wanted`: by default, a parameter of any model.

    For a sharded model, the parameters in a graph are not those of the module.

    The walk ends at the first one, usually a few nodes from the loss, in the model's last layer.
    """
    node: Any = loss.grad_fn
    if node is None:
        return not loss.requires_grad or wanted(loss)  # without a gradient, autograd raises its own error
    nodes, seen = [node], {node}
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)  # a leaf's node has it
        # A Python function may do anything in backward: reentrant checkpointing runs another backward.
        if isinstance(node, BackwardCFunction) or (variable is not None and wanted(variable)):
            return True
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        nodes += new
    return False
