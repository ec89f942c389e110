"""A DDP model as a `Joinable` of its own, for torch's `Join` too."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinTypeError, UnsupportedError
from torch_join._shadow.synced_norms import has_synced_norms
from torch_join.joinables._torch.joinable import WrappingJoinable
from torch_join.joinables.model import ModelPart
from torch_join.joinables.part import Driver, Part


class JoinableModel(WrappingJoinable):
    """A DDP model as a `Joinable` of its own: exact gradients and buffers in torch's `Join` too.

    `Join([JoinableModel(ddp)])` of this package is the same as `Join([ddp])`. In torch's, each forward of
    `ddp` tells the others that this rank has an input; the ranks that have none take part in its
    collectives with a zero-gradient pass. At the end all have the last rank's parameters and buffers.

    Args:
        ddp: The model. Call it, not this object, in the loop.

    Raises:
        JoinTypeError: `ddp` is not a `DistributedDataParallel`.

    Limits:
        In torch's `Join`, which understands `divide_by_initial_world_size` and `weighting` here, a model comes
        first in the list, and a step is one forward of it. Joinables with collectives that are not of this
        package follow it and are called after its backward. Other collectives in the step are not
        mirrored. If a rank raises, the others wait until the process group's timeout, and what was
        installed goes with the `Join` object. `torch_join.Join` has none of these limits.
    """

    is_model = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise JoinTypeError(f"JoinableModel takes a DistributedDataParallel model, not {type(ddp).__name__}.")
        super().__init__(ddp, ddp.process_group, ddp.device)

    def make_part(self, driver: Driver, index: int) -> Part:
        if has_synced_norms(self.wrapped):
            raise UnsupportedError(
                "SyncBatchNorm has collectives in forward and backward, of which a rank that has joined hears nothing"
                " in torch's Join. Use torch_join.Join, or BatchNorm."
            )
        if index > 0 and not isinstance(driver.server.parts[0], ModelPart):
            raise self.misplaced("no JoinableMetric may come before it")
        part = ModelPart(driver, index, self.wrapped)
        part.meets = index == 0
        return part

    def leads(self) -> bool:
        return True

    def is_done(self, kind: str, payload: Any) -> bool:
        return kind != "forward" or not payload[0]  # a forward with gradients waits for its backward
