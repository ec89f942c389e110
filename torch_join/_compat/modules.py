"""Private attributes of torch.nn's modules. Seen in torch 2.13.0."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.utils.prune import BasePruningMethod

_WEIGHT_NORM = "torch.nn.utils.weight_norm"  # deprecated, and may go


def weight_hooks(model: nn.Module) -> list[Callable[[], None]]:
    """Return the hooks that compute, before each forward, attributes from parameters: pruned and normed weights.

    User code may rely on these attributes: torch itself prunes an already pruned module by `module.weight`.
    """
    return [
        partial(hook, module, None)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod) or type(hook).__module__ == _WEIGHT_NORM
    ]
