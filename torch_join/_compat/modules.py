"""Private names of torch's modules and pipelines (seen in torch 2.13.0)."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from torch_join._base.attributes import setting

_STAGE = "torch.distributed.pipelining.stage"
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


def split_backwards(check: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `check` before a backward of a schedule that splits backwards of inputs from those of weights."""
    stage: Any = sys.modules.get(_STAGE)
    own = getattr(stage, "stage_backward_input", None)  # older torch has no such schedules
    if own is None:
        return nullcontext()

    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return own(*args, **kwargs)

    return setting(stage, stage_backward_input=checked)
