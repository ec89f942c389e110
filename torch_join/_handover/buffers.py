"""Buffers that no wrapper synchronizes: those that DDP ignores or does not broadcast, and those of sharded models.

Some of them belong to each rank, such as the statistics of BatchNorm. The model keeps others equal itself, by
collectives in its forward: the averages of a codebook, a center. Joined ranks run no forward, so theirs become stale.
Only observation shows which kind a buffer is: buffers that are equal on all ranks after each has trained are kept
equal. This is decided by module, since BatchNorm's counter is equal even where its statistics are not.
"""

from collections.abc import Container, Iterator, Sequence
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torch_join._base.specs import TensorSpec, flaw
from torch_join._compat import ddp as _compat
from torch_join._compat import optimizer_state as _compat_state
from torch_join._compat.metrics import is_metric
from torch_join._control.channel import Channel
from torch_join._handover.digest import Digests
from torch_join._handover.replicas import set_own
from torch_join._handover.state import Capture

Unsynced = tuple[nn.Module, Container[str] | None]  # a model, and the names of such buffers in it; `None`: all
Buffers = dict[str, Tensor]

_trained: WeakSet[nn.Module] = WeakSet()  # models that have run a forward with gradients on this rank


class UnsyncedBuffers:
    """The unsynchronized buffers of some models, as an object for `hand_over`.

    Args:
        models: The models.
        always: Whether to hand all of them over; `None`: those that were equal on all ranks.

    Attributes:
        can_tell: Whether more than one rank had trained at the last `agree`, or the user has decided.
        undecided: The names of buffers that a step had changed before its forward, when `record` ran.
    """

    def __init__(self, models: Sequence[Unsynced], always: bool | None) -> None:
        self._unsynced = models
        self._always = always
        self.can_tell = always is not None
        self.clear()

    def clear(self) -> None:
        """Forget the recorded state, after a tail."""
        self._seen: tuple[dict[str, int], list[str]] | None = None  # digests, and buffers changed before a forward
        self._alike: set[str] = set()
        self.undecided: list[str] = []

    def record(self, trained: Sequence[nn.Module], changed: Container[int] = ()) -> None:
        """Take digests of the buffers, on every rank, when the first ranks join.

        Args:
            trained: The models that have run a forward with gradients since the last tail.
            changed: The `id` of each buffer that may have been changed by a step that only some ranks run.
        """
        self.clear()
        _trained.update(trained)
        if self._unsynced and self._always is None:
            digests = self._digests([model for model, _ in self._unsynced if model in _trained])
            own = [(path, b) for path, (m, b) in self._modules().items() if not _compat_state.keeps_statistics(m)]
            self._seen = digests, [f"{path}.{name}" for path, b in own for name in b if id(b[name]) in changed]

    def agree(self, channel: Channel) -> bool:
        """Decide which buffers are handed over, and return whether any are; every rank calls this."""
        if not self._unsynced or self._always is not None:
            return bool(self._unsynced and self._always)
        # With only one trained rank, nothing can be concluded.
        answers = channel.gather(self._seen, of=tuple[dict[str, int], list[str]] | None)
        trained = [digests for digests, _ in filter(None, answers) if digests]
        self.can_tell = len(trained) > 1
        first = trained[0] if self.can_tell else {}
        self._alike = {path for path, digest in first.items() if all(each.get(path) == digest for each in trained)}
        changed = sorted({name for _, names in filter(None, answers) for name in names})
        self.undecided = [name.replace(": .", ": ") for name in changed if name.rpartition(".")[0] not in self._alike]
        return bool(self._alike)

    def doubtful(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and contents of buffers that may have to be equal on all ranks.

        The statistics of torch's norms are left out, since they belong to each rank. If `can_tell`, so are integers and
        single numbers, such as counters.
        """
        if self._always is None:
            for path, (module, buffers) in self._modules().items():
                for name, buffer in buffers.items():
                    known = self.can_tell and not (buffer.is_floating_point() and buffer.numel() > 1)
                    if not _compat_state.keeps_statistics(module) and not known:
                        yield f"{path}.{name}".replace(": .", ": "), buffer

    def state_dict(self) -> dict[str, tuple[Buffers, list[str]]]:
        """Return the buffers to hand over, by module, and which of them are saved with the model."""
        modules = {path: entry for path, entry in self._modules().items() if self._always or path in self._alike}
        return {
            path: (buffers, [name for name in buffers if _compat.is_persistent(module, name)])
            for path, (module, buffers) in modules.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, tuple[Buffers, list[str]]]) -> None:
        """Load the buffers that another rank hands over."""
        modules = self._modules(all_of_them=True)
        for path, (received, persistent) in state.items():
            module, own = modules[path]
            for name in own.keys() - received.keys():
                setattr(module, name, None)
            for name, buffer in received.items():
                if TensorSpec.of(buffer).fits(own.get(name)):
                    own[name].copy_(buffer)
                else:
                    set_own(module, name, buffer, name in persistent)

    def _modules(self, all_of_them: bool = False) -> dict[str, tuple[nn.Module, Buffers]]:
        found: dict[str, tuple[nn.Module, Buffers]] = {}
        for index, (model, names) in enumerate(self._unsynced):
            # Metrics sync their states themselves when needed, and SyncBatchNorm's buffers are handled elsewhere.
            skipped = {id(part) for module in model.modules() if is_metric(module) for part in module.modules()}
            for path, module in model.named_modules():
                if id(module) in skipped or isinstance(module, nn.SyncBatchNorm):
                    continue
                own = dict(module.named_buffers(recurse=False))
                if names is not None:
                    own = {name: b for name, b in own.items() if f"{path}.{name}".removeprefix(".") in names}
                if all_of_them or (own and all(flaw(buffer) is None for buffer in own.values())):
                    found[f"model {index} ({type(model).__name__}): {path}"] = module, own
        return found

    def _digests(self, models: Sequence[nn.Module]) -> dict[str, int]:
        within = {id(module) for model in models for module in model.modules()}
        found = {path: buffers for path, (module, buffers) in self._modules().items() if id(module) in within}
        capture = Capture()
        trees = {path: [capture.tree(buffers, path)] for path, buffers in found.items()}
        return Digests(trees, capture.tensors).read()
