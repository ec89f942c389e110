"""Objects of kinds that do not go over the store: they go over the process group, pickled, as in torch's own.

Whoever is in the process group is trusted, as torch trusts it: its object collectives unpickle, too. All ranks of
the group enter, those that have joined in answer to a record that says so, and never between the begin of a
backward and its last bucket.

The contents travel as bytes of CPU tensors, over a gloo group of the same ranks where the group itself has no backend
for these: no object waits for an accelerator, nor depends on which device is the current one.
"""

import pickle
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from torch_join._base.errors import JoinTypeError
from torch_join._control.codec import closed
from torch_join._handover import transfer as _transfer


@closed("apart")
class Apart(NamedTuple):
    """Stands in a record for what comes after it, over the process group."""


def pack(value: Any, what: str) -> bytes:
    """Pickle `value`, before others are told that it comes.

    Raises:
        JoinTypeError: It cannot be pickled.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise JoinTypeError(f"{what} cannot be pickled: {error}") from error


def broadcast(packed: bytes | None, source: int, group: dist.ProcessGroup | None) -> Any:
    """Return the value that the source has packed; every rank of the group calls this at the same time.

    Args:
        packed: What `pack` has returned, on the source.
        source: The source's rank in `group`.
        group: The process group, by default the whole world.
    """
    group = group or cast(dist.ProcessGroup, dist.group.WORLD)
    found = [packed]
    dist.broadcast_object_list(found, group_src=source, group=_transfer._group_for("cpu", group))
    return pickle.loads(cast(bytes, found[0]))
