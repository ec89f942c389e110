"""Ranks that compute each batch together: those of a mesh that differ only along what FSDP does not shard over."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from torch_join._base.errors import UnsupportedError
from torch_join._shadow._sharded import compat as _compat


def teams_of(model: nn.Module, ranks: Sequence[int]) -> list[list[int]]:
    """Return the teams of more than one rank, as indices into `ranks`.

    Raises:
        UnsupportedError: FSDP shards a part of the model over fewer ranks than take part.
    """
    for size in _compat.group_sizes(model):
        if size != len(ranks):
            raise UnsupportedError(
                f"A part of {type(model).__name__} is sharded and averaged over {size} ranks, and ranks {list(ranks)}"
                " take part. All of them must hold a shard of each part: make its process_group of all ranks."
            )
    teams: dict[tuple[int, ...], list[int]] = {}
    for mesh in _compat.meshes(model):
        whole = _compat.root_mesh(mesh)
        if {*whole.mesh.flatten().tolist()} != {*ranks}:
            held = sorted(whole.mesh.flatten().tolist())
            raise UnsupportedError(
                f"A part of {type(model).__name__} is on a mesh of ranks {held}, and ranks {list(ranks)} take part."
                " All of them must hold a shard of each part: make the mesh over all ranks."
            )
        for team in _across(whole, mesh):
            teams[tuple(team)] = [ranks.index(rank) for rank in team]
    return [team for team in teams.values() if len(team) > 1]


def _across(whole: Any, mesh: Any) -> list[list[int]]:
    names = whole.mesh_dim_names or ()
    shards = mesh.mesh_dim_names or ()
    if whole is mesh or whole.ndim == mesh.ndim or not {*shards} <= {*names}:
        return []
    order = [names.index(name) for name in (*shards, *(name for name in names if name not in shards))]
    size = mesh.mesh.numel()
    found: list[list[int]] = whole.mesh.permute(order).reshape(size, -1).tolist()
    return found
