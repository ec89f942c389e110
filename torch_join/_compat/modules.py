"""What torch.nn's modules keep to themselves. Seen in torch 2.13.0."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.utils.prune import BasePruningMethod

_WEIGHT_NORM = "torch.nn.utils.weight_norm"  # which is deprecated, and may go


def weight_hooks(model: nn.Module) -> list[Callable[[], None]]:
    """Return what computes, before each forward, attributes that follow from parameters: pruned and normed weights.

    Code of the user's may go by the attributes: torch prunes what is pruned already by `module.weight`.
    """
    return [
        partial(hook, module, None)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod) or type(hook).__module__ == _WEIGHT_NORM
    ]
