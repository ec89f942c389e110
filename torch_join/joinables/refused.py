"""What `Join` refuses when it is made, since it would train wrongly or wait for ever."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base import compat as _compat
from torch_join._base.errors import UnsupportedError

_FSDP, _DTENSOR = "torch.distributed.fsdp", "torch.distributed.tensor"
_LOCAL_SGD = "torch.distributed.optim.post_localSGD_optimizer"
_INSTEAD = (
    "Use DistributedDataParallel, with a ZeroRedundancyOptimizer to shard the optimizer's state, or give every rank the"
    " same number of batches and leave Join out."
)


def check_supported(thing: Any, joinables: Sequence[Any]) -> None:
    """Raise if `thing` cannot take part.

    Raises:
        UnsupportedError: It is, or holds, a model that is sharded (FSDP, `fully_shard`, `DTensor`s), a
            `DataParallel`, or a `DistributedDataParallel` that is not itself among `joinables`; or it is
            trained by post-local SGD.
    """
    name = type(thing).__name__
    if isinstance(thing, nn.DataParallel):
        raise UnsupportedError(
            "DataParallel uses the devices of one process and averages nothing between processes, so a rank that has"
            " joined has nothing to take part in. Use DistributedDataParallel."
        )
    modules = list(thing.modules()) if isinstance(thing, nn.Module) else []
    if any(isinstance(module, _classes(_FSDP, "FullyShardedDataParallel", "FSDPModule")) for module in modules):
        raise UnsupportedError(
            f"{name} is sharded by FSDP: each forward and backward of the active ranks needs the shards of the ranks"
            f" that have joined, which would have to run the model too. {_INSTEAD}"
        )
    if isinstance(thing, _classes(_LOCAL_SGD, "PostLocalSGDOptimizer")) or (
        isinstance(thing, DistributedDataParallel) and _compat.has_local_sgd_hook(thing)
    ):
        raise UnsupportedError(
            f"{name} is trained by post-local SGD: each rank trains parameters of its own for some steps, which are"
            " then averaged over all ranks, and a rank that has joined has stopped training its own. Average the"
            " gradients in each step (leave the hook and PostLocalSGDOptimizer out), or give every rank the same number"
            " of batches and leave Join out."
        )
    if any(isinstance(tensor, _classes(_DTENSOR, "DTensor")) for tensor in _parameters(thing)):
        raise UnsupportedError(
            f"{name} holds sharded parameters (DTensor), of which a rank that has joined still owns a part. {_INSTEAD}"
        )
    for module in modules:
        if isinstance(module, DistributedDataParallel) and not any(module is one for one in joinables):
            raise UnsupportedError(
                f"{name} holds a DistributedDataParallel model that was not given to Join, so that nobody would"
                " announce what it does. Give Join the DistributedDataParallel itself; the loop may go on calling it"
                f" through {name} (torch.compile's, for example). What only keeps a copy, such as an AveragedModel,"
                " takes the inner model: `ddp.module`."
            )


def _classes(module: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module that takes long to import: while nobody has imported it, nothing is of them."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def _parameters(thing: Any) -> list[Any]:
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    return [parameter for group in getattr(thing, "param_groups", ()) for parameter in group["params"]]
