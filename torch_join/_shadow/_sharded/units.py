"""The units of a model."""

from functools import partial

from torch import nn

from torch_join._base.errors import UnsupportedError
from torch_join._compat import fsdp as _compat
from torch_join._shadow._sharded.fsdp1 import FlatParamUnit
from torch_join._shadow._sharded.fsdp2 import ParamGroupUnit
from torch_join._shadow._sharded.unit import Unit


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
