"""Whether a loss leads to a model's parameters: a constant, returned to skip a batch, does not.

Its backward brings the model nothing, and does not even come to it: DDP hears of no gradient, and neither averages nor
complains, while the other ranks wait for this one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction


def leads_to(loss: Tensor, wanted: Callable[[Tensor], bool] = lambda v: isinstance(v, nn.Parameter)) -> bool:
    """Whether a backward of `loss` may come to a variable that is `wanted`: by default, a parameter of any model.

    Of one that is sharded, those in a graph are not those of the module.

    The walk ends at the first one, which is a few nodes from the loss, as a rule, in the model's last layer.
    """
    node: Any = loss.grad_fn
    if node is None:
        return not loss.requires_grad or wanted(loss)  # autograd has an error of its own for the first
    nodes, seen = [node], {node}
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)  # of a leaf's node
        # A function in Python may do anything in backward: reentrant checkpointing runs another one.
        if isinstance(node, BackwardCFunction) or (variable is not None and wanted(variable)):
            return True
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        nodes += new
    return False
