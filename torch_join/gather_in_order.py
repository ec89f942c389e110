"""Gathers the rows that the ranks computed in a loop over uneven batches, in order.

All data goes over the process group as bytes, in pieces of bounded size, so any dtype arrives bit for bit.
"""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torch_join._base.devices import current_device
from torch_join._base.errors import JoinError, JoinTypeError, JoinValueError, name_ranks
from torch_join._base.rows import Leaf, Rows, build, check_alike, leaves, split
from torch_join._base.specs import raw_bytes
from torch_join._handover import objects as _objects
from torch_join._handover.transfer import collect, exchange

Group = dist.ProcessGroup | None
_NO_INDICES = (
    "A sampler distributes one dataset to the ranks, so the order of the gathered rows is unknown. Return the index"
    " with each sample, and pass each batch's indices as `indices`. If each rank has its own dataset, pass"
    " order='shards' to order the rows by rank."
)


@dataclass(frozen=True)
class _Message:
    """A rank's message to the others before it sends rows.

    Attributes:
        error: Why this rank could not prepare its rows; empty if it could.
        tree: The structure of its batches; `None` if it has no batch.
        count: The number of rows.
        packed: The pickled size in bytes of each list, by path.
        has_indices: Whether it knows the indices of its samples.
        way: The requested receiver and `by_rank`, which must be the same on all ranks.
    """

    error: str = ""
    tree: Any = None
    count: int = 0
    packed: dict[str, int] = field(default_factory=dict)
    has_indices: bool = False
    way: tuple[int | None, bool] = (None, False)


@torch.no_grad()
def gather_in_order(
    batches: Sequence[Any],
    indices: Sequence[Any] | None = None,
    *,
    group: Group = None,
    rank: int | None = None,
    by_rank: bool = False,
    what: str = "rows",
    needs_indices: bool = False,
) -> Any:
    """Gather the rows of all ranks in one structure like that of a batch; all ranks call this.

    A structure is a tensor, a list, or a tuple or a mapping of structures. Tensors are joined along their first
    dimension, and lists end to end. A mapping becomes a dictionary.

    With indices, rows are sorted by index, and each index occurs once: the first row of the lowest rank that has it. (A
    sampler that pads, such as torch's `DistributedSampler`, gives some samples to two ranks.) Without indices, rows are
    in the order of the ranks and their batches.

    Args:
        batches: This rank's structures, one per batch. A rank may have none.
        indices: For each batch, the indices of its samples in the dataset that all ranks share.
        group: The process group, by default the whole world.
        rank: The rank in the group that gets the result; by default all do.
        by_rank: Whether each rank's indices belong to its own dataset. Rows are then sorted by rank, then by index.
        what: The name of a structure in errors.
        needs_indices: Whether to raise if rows come without indices.

    Returns:
        The structure. `None` on ranks other than `rank`, and on all ranks if no rank has a batch.

    Raises:
        JoinValueError: On all ranks, if some rank's rows cannot be joined. The message names the rank and the part.
    """
    values: dict[str, Tensor] = {}
    known: Tensor | None = None
    try:
        if needs_indices and len(batches) > 0 and indices is None:
            raise JoinValueError(_NO_INDICES)
        message, values, known = _prepare(batches, indices, what, (rank, by_rank))
    except Exception as error:  # the other ranks wait for a message, so they get the error
        message = _Message(str(error) if isinstance(error, JoinError) else repr(error))
    messages: list[_Message] = _objects.gather(message, f"What a rank says of its {what}", group)
    tree = _check(messages, what)
    if tree is None:
        return None
    counts = [each.count for each in messages]
    receives = rank is None or rank == _rank_in(group)
    places, total = _places(known, messages, by_rank, group, rank)
    joined: dict[str, Any] = {}
    for leaf in leaves(tree):
        data = values.pop(leaf.path, None)
        if leaf.dtype is None:
            pieces = collect(data, [each.packed.get(leaf.path, 0) for each in messages], group, rank)
            if receives:
                joined[leaf.path] = _join_lists(
                    [pickle.loads(piece) if piece else [] for piece in pieces], places, total
                )
        else:
            joined[leaf.path] = _join_tensors(leaf, data, counts, places, total, group, rank)
    return build(tree, joined) if receives else None


def gather_given(
    rows: Any,
    indices: Any,
    group: Group,
    rank: int | None,
    order: Literal["dataset", "shards"] | None = None,
    is_dealt_out: bool = False,
) -> Any:
    """Implement `Join.gather_in_order`, for one structure, a list with one per batch, or `None`.

    Args:
        rows: The user's rows.
        indices: The user's indices.
        group: The process group.
        rank: The rank in the group that gets the result; by default all do.
        order: `"dataset"`: indices belong to a dataset that all ranks share. `"shards"`: to each rank's own dataset.
        is_dealt_out: Whether one dataset is split among the ranks. If so, ordering its rows requires indices.

    Raises:
        JoinValueError: On all ranks, if the dataset's order is required and a rank passes no indices.
    """
    if rows is None:
        rows, indices = [], None
    elif not isinstance(rows, list):
        rows, indices = [rows], None if indices is None else [indices]
    refuses = order == "dataset" or (order is None and is_dealt_out)
    return gather_in_order(
        rows,
        indices if rows else None,
        group=group,
        rank=rank,
        by_rank=order == "shards",
        needs_indices=refuses,
    )


# ---------------------------------------------------------------- this rank's rows


def _prepare(
    batches: Sequence[Any], indices: Sequence[Any] | None, what: str, way: tuple[int | None, bool]
) -> tuple[_Message, dict[str, Tensor], Tensor | None]:
    """Return the message, the data by path (bytes of shape rows x row size, or of a pickled list), and all indices."""
    if indices is not None and len(indices) != len(batches):
        raise JoinValueError(f"Got indices for {len(indices)} batches, but {what} for {len(batches)}.")
    known = None if indices is None else [_as_indices(each) for each in indices]
    parts: list[Rows] = []
    for number, batch in enumerate(batches):
        try:
            part = split(batch, what, None if known is None else len(known[number]))
        except JoinError as error:
            raise type(error)(f"Batch {number}: {error}") from None
        if parts:
            check_alike(parts[0].tree, part.tree, ["batch 0", f"batch {number}"])
        parts.append(part)
    if not parts:
        return _Message(way=way), {}, None
    tree = parts[0].tree
    values = {leaf.path: _as_bytes(leaf, [part.values[leaf.path] for part in parts]) for leaf in leaves(tree)}
    packed = {leaf.path: len(values[leaf.path]) for leaf in leaves(tree) if leaf.dtype is None}
    message = _Message("", tree, sum(part.count for part in parts), packed, known is not None, way)
    return message, values, None if known is None else torch.cat(known)


def _as_indices(of_batch: Any) -> Tensor:
    given = of_batch.flatten().tolist() if isinstance(of_batch, Tensor) else [*of_batch]
    if any(isinstance(index, bool) or not hasattr(index, "__index__") for index in given):
        raise JoinTypeError(f"Indices must be integers, not {given[:3]}.")
    return torch.tensor([int(index) for index in given], dtype=torch.int64, device="cpu")


def _as_bytes(leaf: Leaf, values: list[Any]) -> Tensor:
    if leaf.dtype is None:
        packed = _objects.pack([item for value in values for item in value], leaf.path)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)[:, None]
    whole = values[0] if len(values) == 1 else torch.cat(values)
    return raw_bytes(whole).view(len(whole), leaf.row_bytes)


# ---------------------------------------------------------------- checking the ranks' messages


def _check(messages: Sequence[_Message], what: str) -> Any:
    """Return the structure of the batches; `None` if there are none."""
    for number, each in enumerate(messages):
        if each.error:
            raise JoinValueError(f"The {what} of rank {number} cannot be gathered. {each.error}")
    if any(each.way != messages[0].way for each in messages):
        raise JoinValueError(
            f"The ranks requested the {what} in different ways. Pass the same `rank=` and order on all."
        )
    nonempty = [number for number, each in enumerate(messages) if each.tree is not None]
    if not nonempty:
        return None
    first = messages[nonempty[0]]
    for number in nonempty:
        check_alike(first.tree, messages[number].tree, [f"rank {nonempty[0]}", f"rank {number}"])
    without = [number for number in nonempty if not messages[number].has_indices]
    if 0 < len(without) < len(nonempty):
        raise JoinValueError(
            f"{name_ranks(without).capitalize()} passed no indices, but other ranks did. Pass indices on all ranks"
            " that have a batch, or on none."
        )
    return first.tree


# ---------------------------------------------------------------- where rows go


def _places(
    known: Tensor | None, messages: Sequence[_Message], by_rank: bool, group: Group, to: int | None
) -> tuple[list[Tensor], int]:
    """Call `place_rows`; a rank that receives no rows does not receive their indices either."""
    counts = [each.count for each in messages]
    if not any(each.has_indices for each in messages):
        return place_rows(counts, None, by_rank)
    own = None if known is None else raw_bytes(known).view(-1, 8)
    found = [torch.empty(count, dtype=torch.int64, device="cpu") for count in counts]
    for rank, first, rows in exchange(own, 8, counts, group, to):
        found[rank][first : first + len(rows)] = raw_bytes(rows.cpu()).view(torch.int64)
    return place_rows(counts, found, by_rank)


def place_rows(counts: Sequence[int], indices: Sequence[Tensor] | None, by_rank: bool) -> tuple[list[Tensor], int]:
    """Return the place of each rank's rows in the result (-1 for a row left out), and the number of rows in the result.

    Args:
        counts: Each rank's number of rows.
        indices: The indices of each rank's rows; `None` if they are not known.
        by_rank: Whether each rank's indices belong to its own dataset.
    """
    if indices is not None and not by_rank:
        places, total = _ranked(torch.cat([*indices]))
        return [*torch.split(places, [*counts])], total
    of_each, total = [], 0
    for rank, count in enumerate(counts):
        places, number = (torch.arange(count, device="cpu"), count) if indices is None else _ranked(indices[rank])
        of_each.append(torch.where(places < 0, places, places + total))
        total += number
    return of_each, total


def _ranked(indices: Tensor) -> tuple[Tensor, int]:
    """Return each index's place in sorted order (-1 for a repeated index), and the number of distinct indices."""
    ordered, order = indices.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    places = torch.empty_like(order)
    places[order] = torch.where(is_first, is_first.cumsum(0) - 1, -1)
    return places, int(is_first.sum())


def _join_lists(lists: Iterable[list[Any]], places: Sequence[Tensor], total: int) -> list[Any]:
    joined: list[Any] = [None] * total
    for items, at in zip(lists, places, strict=True):
        for item, place in zip(items, at.tolist(), strict=True):
            if place >= 0:
                joined[place] = item
    return joined


def _join_tensors(
    leaf: Leaf,
    data: Tensor | None,
    counts: Sequence[int],
    places: Sequence[Tensor],
    total: int,
    group: Group,
    to: int | None,
) -> Tensor | None:
    assert leaf.dtype is not None
    kind = torch.device("cpu") if leaf.device == "cpu" else current_device(group)
    device = kind if data is None else data.device
    receives = to is None or to == _rank_in(group)
    joined = torch.empty((total if receives else 0, leaf.row_bytes), dtype=torch.uint8, device=device)
    for rank, first, rows in exchange(data, leaf.row_bytes, counts, group, to, device):
        at = places[rank][first : first + len(rows)]
        kept = at >= 0
        joined[at[kept].to(device)] = rows.to(device)[kept.to(device)]
    return joined.flatten().view(leaf.dtype).view(total, *leaf.shape) if receives else None


# ---------------------------------------------------------------- over the process group


def _rank_in(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0
