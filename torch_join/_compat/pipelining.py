"""Private names of torch's pipelines (seen in torch 2.13.0)."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch_join._base.attributes import setting

_STAGE = "torch.distributed.pipelining.stage"


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
