"""What a rank hears when another one fails."""

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch.distributed as dist

from torch_join import JoinError
from torch_join.integration import Channel, telling_failures


def a_hole() -> None:
    raise KeyError("a hole")


def told(channel: Channel | None, *acts: Callable[[], object], tells: bool = True) -> tuple[str, float]:
    """Do these things, of which one is to end in an error, and leave; return what that says, and the seconds it took.

    Args:
        channel: What is closed then, if it is open by now.
        *acts: They are called without arguments.
        tells: Whether this rank tells the others of the error over the channel.
    """
    text, begin = "", time.monotonic()
    try:
        with telling_failures(channel) if channel is not None and tells else nullcontext():
            for act in acts:
                act()
    except (JoinError, KeyError) as error:
        text = str(error)
        if isinstance(error.__cause__, RuntimeError):
            text += f" <- {type(error.__cause__).__name__}"
    seconds = time.monotonic() - begin
    if channel is not None:
        channel.close()  # the store's host stays until the others have heard, too
    dist.destroy_process_group()
    return text, seconds
