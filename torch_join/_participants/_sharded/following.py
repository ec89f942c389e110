"""A sharded model's units: announces their gathers and reductions on an active rank, repeats them on a joined rank."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_join._base.attributes import setting
from torch_join._base.errors import JoinError, UnsupportedError
from torch_join._compat import fsdp as _compat
from torch_join._control.codec import foreign
from torch_join._participants._sharded.contents import Contents
from torch_join._participants.participant import Driver, Participant
from torch_join._shadow._sharded.fsdp1 import FlatParamUnit
from torch_join._shadow._sharded.fsdp2 import ParamGroupUnit
from torch_join._shadow._sharded.unit import PART, SHARD, Gather, Reduction, Unit


class FollowingParticipant(Participant):
    """A sharded model's participant, as the `Observer` of its units: announces and follows their actions.

    Args:
        driver: See `Participant`.
        index: See `Participant`.
        model: The model, with parts that FSDP has sharded.

    Attributes:
        model: The model.
        units: The model's units.
        reduces: Whether this rank is inside a reduction, in which an optimizer may step.
        contents: The noted state of this rank's shards, which is checked in the tail before a unit is gathered.

    Raises:
        UnsupportedError: Joined ranks cannot follow the model.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "gather": tuple[int, Gather],
        "reduce": tuple[int, Reduction],
        "reshard": tuple[int, str],
    }

    def __init__(self, driver: Driver, index: int, model: nn.Module) -> None:
        super().__init__(driver, index)
        self.model = model
        self.units = units_of(model)
        self._teams = _teams_of(model, self.members.global_ranks)
        self.model_parallel_groups = [self.members.named(peers) for peers in self._teams]
        self._seen: tuple[int, ...] = ()  # the active ranks for which the groups were last checked
        self.reduces = False
        self.contents = Contents(lambda: self.shards)
        if is_first_generation(model) and dist.get_debug_level() == dist.DebugLevel.DETAIL:
            raise UnsupportedError(
                "FullyShardedDataParallel under TORCH_DISTRIBUTED_DEBUG=DETAIL compares the order in which ranks run"
                " their modules, but a finished rank does not run them. Use another debug level, or fully_shard."
            )

    def enter(self) -> None:
        self._undo += [unit.watch(index, self) for index, unit in enumerate(self.units)]

    def leave_tail(self) -> None:
        self.reach_joined_state()

    def reach_joined_state(self) -> None:
        """Bring each unit to the state of the joined ranks; called on a rank that joins, and at the end."""
        for unit in self.units:
            unit.reach_joined_state()

    @property
    def places(self) -> list[tuple[int, int]]:
        """Each unit's `place`."""
        return [unit.place for unit in self.units]

    @places.setter
    def places(self, places: list[tuple[int, int]]) -> None:
        if len(places) != len(self.units):
            raise foreign("the order of a sharded model", f"{len(places)} units of {len(self.units)}")
        for place, unit in sorted(zip(places, self.units, strict=True), key=lambda each: each[0]):
            unit.place = place

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shards, frozen ones included."""
        return [shard for unit in self.units for shard in unit.shards]

    # ------------------------------------------------------------ on an active rank

    def is_quiet(self) -> bool:
        return self.tail_log.is_quiet()

    def before_backward(self) -> None:
        """See `Observer`."""

    def around(self, unit: int, kind: str, payload: Gather | Reduction | str) -> AbstractContextManager[None]:
        """See `Observer`."""
        if self.members.serves:
            return nullcontext()
        if self.tail_log.meet():
            if self._seen != self.members.active:
                self._check_model_parallel_groups()
            if kind == "gather":
                self.contents.check_writes(self.units[unit].shards, self.members.joined_names)
            self.announce(kind, (unit, payload))
        return self._reducing() if kind == "reduce" else self.tail_log.own_collectives()

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        with setting(self, reduces=True), self.tail_log.own_collectives():
            yield

    def _check_model_parallel_groups(self) -> None:
        """Raise if some, but not all, of the ranks that compute a batch together have joined.

        Raises:
            JoinError: Some ranks of such a group have joined.
        """
        self._seen = self.members.active
        for peers in self._teams:
            if 0 < len(joined := set(peers) - {*self._seen}) < len(peers):
                raise JoinError(
                    f"Ranks {sorted(peers)} compute each batch together (tensor parallelism: a mesh dimension over"
                    f" which FSDP does not shard), but ranks {sorted(joined)} finished before the others. Give all of"
                    " these ranks the same batches: shard the data only over the data-parallel dimension."
                )

    # ------------------------------------------------------------ on a joined rank

    def mirror(self, kind: str, payload: Any) -> None:
        """Repeat an active rank's action on a unit."""
        index, rest = payload
        if not 0 <= index < len(self.units):
            raise foreign("a record of a sharded model", f"unit {index} of {len(self.units)}")
        unit = self.units[index]
        if kind == "gather":
            with torch.inference_mode(rest.inference):
                unit.gather(rest)
        elif kind == "reduce":
            unit.reduce(rest)
        else:
            if rest not in (SHARD, PART):
                raise foreign("a record of a sharded model", f"a unit that is {rest!r}")
            unit.reshard(rest)


def _teams_of(model: nn.Module, ranks: Sequence[int]) -> list[list[int]]:
    """Return, as indices into `ranks`, the groups of ranks that compute each batch together, if any.

    The ranks of a group differ only along mesh dimensions over which FSDP does not shard.

    Raises:
        UnsupportedError: FSDP shards a part of the model over fewer ranks than take part.
    """
    for size in _compat.group_sizes(model):
        if size != len(ranks):
            raise UnsupportedError(
                f"A part of {type(model).__name__} is sharded and averaged over {size} ranks, but Join covers ranks"
                f" {list(ranks)}, each of which must hold a shard. Use a process_group of all ranks."
            )
    model_parallel_groups: dict[tuple[int, ...], list[int]] = {}
    for mesh in _compat.meshes(model):
        whole = _compat.root_mesh(mesh)
        if {*whole.mesh.flatten().tolist()} != {*ranks}:
            held = sorted(whole.mesh.flatten().tolist())
            raise UnsupportedError(
                f"A part of {type(model).__name__} is on a mesh of ranks {held}, but Join covers ranks {list(ranks)},"
                " each of which must hold a shard. Use a mesh over all ranks."
            )
        for peers in _across(whole, mesh):
            model_parallel_groups[tuple(peers)] = [ranks.index(rank) for rank in peers]
    return [peers for peers in model_parallel_groups.values() if len(peers) > 1]


def _across(whole: Any, mesh: Any) -> list[list[int]]:
    names = whole.mesh_dim_names or ()
    shards = mesh.mesh_dim_names or ()
    if whole is mesh or whole.ndim == mesh.ndim or not {*shards} <= {*names}:
        return []
    order = [names.index(name) for name in (*shards, *(name for name in names if name not in shards))]
    size = mesh.mesh.numel()
    found: list[list[int]] = whole.mesh.permute(order).reshape(size, -1).tolist()
    return found


def is_first_generation(model: nn.Module) -> bool:
    """Whether a model is sharded by `FullyShardedDataParallel`, and not by `fully_shard`.

    Raises:
        UnsupportedError: It is sharded by both.
    """
    first = any(isinstance(module, _compat.FullyShardedDataParallel) for module in model.modules())
    if first and any(isinstance(module, _compat.FSDPModule) for module in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded by FullyShardedDataParallel in one part and by fully_shard in"
            " another, which clip and save differently. Use only one, preferably fully_shard, for the whole model."
        )
    return first


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the same order on all ranks.

    Raises:
        UnsupportedError: A trained parameter is in no unit, or a unit is not sharded.
    """
    is_first_generation(model)
    init = partial(_compat.init_roots, model)
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, _compat.FSDPModule):
            found = {id(group): ParamGroupUnit(group, name, init) for group in _compat.param_groups(module)}
            units += [unit for key, unit in found.items() if key not in seen]
            seen |= found.keys()
        elif isinstance(module, _compat.FullyShardedDataParallel) and module._handle is not None:
            if not module._handle.uses_sharded_strategy and module._handle.world_size > 1:  # FSDP sets it for one rank
                raise UnsupportedError(
                    f"{name or 'The model'} is a FullyShardedDataParallel with NO_SHARD, which PyTorch has"
                    " deprecated. Use DistributedDataParallel, which does not shard either."
                )
            if id(module._handle) not in seen:
                units.append(FlatParamUnit(module, name, init))
            seen.add(id(module._handle))
    known = {id(parameter) for unit in units for parameter in unit.registered}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise UnsupportedError(
                f"{name} is trained but not sharded by FSDP (ignored_params, a module outside it), so its gradient is"
                " never averaged. Shard, freeze or wrap it in DistributedDataParallel; if it is an expert that only"
                ' this rank has, use Join(..., placeholder="last"): see docs/spread.md.'
            )
    return units
