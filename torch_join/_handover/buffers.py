"""Buffers that no wrapper keeps alike: those of a model that does not broadcast them, ignored ones, a sharded model's.

Some are each rank's own, as BatchNorm's statistics then are. Others the model keeps alike itself, by collectives in its
forward: a codebook's averages, a centre. Ranks that have joined run no forward, so that theirs grow old. Which is which
only shows: what all ranks hold alike after each has trained, they keep alike. That is decided by module, since
BatchNorm's counter is alike where its statistics are not.
"""

import hashlib
from collections.abc import Container, Iterator, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torch_join._base import compat as _compat
from torch_join._base.compat_metrics import is_metric
from torch_join._base.specs import TensorSpec, flaw
from torch_join._control.channel import Channel
from torch_join._handover import compat as _compat_state
from torch_join._handover.digest import checksums

Unsynced = tuple[nn.Module, Container[str] | None]  # a model, and the names of these buffers; `None`: all are
Buffers = dict[str, Tensor]

_trained: WeakSet[nn.Module] = WeakSet()  # the models that have run a forward with gradients on this rank


class UnsyncedBuffers:
    """Those of some models; what `hand_over` takes of them.

    Args:
        models: The models.
        always: Whether they are replicas on all ranks; `None`: what all held alike.
    """

    def __init__(self, models: Sequence[Unsynced], always: bool | None) -> None:
        self._unsynced = models
        self._always = always
        self.clear()

    def clear(self) -> None:
        """Forget what there was: a tail is over."""
        self._seen: dict[str, str] | None = None
        self._alike: set[str] = set()

    def look(self, trained: Sequence[nn.Module]) -> None:
        """Look at what there is, on every rank, where the first ones join.

        Args:
            trained: The models that have run a forward with gradients since the last tail.
        """
        self.clear()
        _trained.update(trained)
        if self._unsynced and self._always is None:
            self._seen = self._digests([model for model, _ in self._unsynced if model in _trained])

    def agree(self, channel: Channel) -> bool:
        """Return whether some are handed over; every rank calls this."""
        if not self._unsynced or self._always is not None:
            return bool(self._unsynced and self._always)
        everyone = channel.gather(self._seen, of=dict[str, str] | None)
        mine = everyone[0] or {}
        self._alike = {
            path for path, digest in mine.items() if all((its or {}).get(path) == digest for its in everyone)
        }
        return bool(self._alike)

    def doubtful(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the contents of what may have to be alike, and is not handed over if it is not now.

        Counters and other single numbers are left out, and the statistics of torch's norms: these are known.
        """
        if self._always is None:
            for path, (module, buffers) in self._modules().items():
                for name, buffer in buffers.items():
                    if not _compat_state.keeps_statistics(module) and buffer.is_floating_point() and buffer.numel() > 1:
                        yield f"{path}.{name}".replace(": .", ": "), buffer

    def state_dict(self) -> dict[str, tuple[Buffers, list[str]]]:
        """Return what is handed over, by module, and which of it is saved with the model."""
        modules = {path: its for path, its in self._modules().items() if self._always or path in self._alike}
        return {
            path: (buffers, [name for name in buffers if _compat.is_persistent(module, name)])
            for path, (module, buffers) in modules.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, tuple[Buffers, list[str]]]) -> None:
        """Take what another rank hands over."""
        here = self._modules(all_of_them=True)
        for path, (theirs, persistent) in state.items():
            module, mine = here[path]
            for name in mine.keys() - theirs.keys():
                setattr(module, name, None)
            for name, buffer in theirs.items():
                if TensorSpec.of(buffer).fits(mine.get(name)):
                    mine[name].copy_(buffer)
                elif hasattr(module, name):
                    setattr(module, name, buffer)
                else:
                    module.register_buffer(name, buffer, name in persistent)

    def _modules(self, all_of_them: bool = False) -> dict[str, tuple[nn.Module, Buffers]]:
        found: dict[str, tuple[nn.Module, Buffers]] = {}
        for index, (model, which) in enumerate(self._unsynced):
            # Metrics sync their states as they need them, and SyncBatchNorm's are taken care of.
            apart = {id(part) for module in model.modules() if is_metric(module) for part in module.modules()}
            for path, module in model.named_modules():
                if id(module) in apart or isinstance(module, nn.SyncBatchNorm):
                    continue
                own = dict(module.named_buffers(recurse=False))
                if which is not None:
                    own = {name: b for name, b in own.items() if f"{path}.{name}".removeprefix(".") in which}
                if all_of_them or (own and all(flaw(buffer) is None for buffer in own.values())):
                    found[f"model {index} ({type(model).__name__}): {path}"] = module, own
        return found

    def _digests(self, models: Sequence[nn.Module]) -> dict[str, str]:
        within = {id(module) for model in models for module in model.modules()}
        found = {path: buffers for path, (module, buffers) in self._modules().items() if id(module) in within}
        sums = iter(checksums([buffer for buffers in found.values() for buffer in buffers.values()]))
        said = {
            path: [f"{name} {buffer.dtype} {tuple(buffer.shape)} {next(sums)}" for name, buffer in buffers.items()]
            for path, buffers in found.items()
        }
        return {path: hashlib.blake2b("; ".join(its).encode(), digest_size=8).hexdigest() for path, its in said.items()}
