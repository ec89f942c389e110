"""Finds changes that a rank's code makes to objects given to `Join` after it has left a loop by `break`.

A generator that is being closed cannot tell a `break` from an exception. If it waited for other ranks, these would wait
for a rank that may have failed. So a rank that leaves a loop does not wait, and receives the last rank's state only
when the ranks meet next. Flags that its code has set in between (`model.eval()`) are kept. Any other change would be
overwritten, or made a second time by a rank that is still serving in its loop and runs that code later. So changes are
recorded here, and raise when the ranks meet.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_join._base.errors import JoinDriftWarning, JoinError, name_ranks
from torch_join._handover.digest import Digests
from torch_join._handover.replicas import ignored_parameters, kind_of, named
from torch_join._handover.state import Capture

# Whether a rank has left its loop by `break`; its changes since then, or `None` if unknown; and whether it has stepped
# its shard of a ZeroRedundancyOptimizer for the others since then.
ExitReport = tuple[bool, list[str] | None, bool]

_FLAGS = ("requires_grad", "training")
_NAMES = {"groups": "param_groups", "own": "state_dict()"}
_SHOWN = 8


class EarlyExit:
    """The state of the objects passed to `Join` when this rank left its loop.

    Args:
        objects: Everything passed to `Join`.
        states: The objects that are handed over; `None` if this rank's code may have run since it left the loop, or if
            nothing will be handed over.
    """

    def __init__(self, objects: Sequence[Any], states: Sequence[Any] | None) -> None:
        self._objects = objects
        self._flags = _read(objects)
        self._set: dict[nn.Module | Tensor, bool] = {}  # flags that this rank's own code has set since
        self._states = states
        self._before = digests_of(states)
        self._now: Digests | None = None

    def meet(self) -> None:
        """Record the current state, and flags changed since the break, before this rank serves others."""
        self._now = digests_of(self._states)
        self._set |= {one: flag for one, flag in _read(self._objects).items() if self._flags.get(one, flag) != flag}

    def after_handover(self) -> None:
        """Set the flags again; another handover may follow (for a checkpoint within the others' loop)."""
        for one, flag in self._set.items():
            if isinstance(one, nn.Module):
                one.training = flag
            else:
                one.requires_grad_(flag)
        self._flags = _read(self._objects)
        self._before = self._now

    def changed(self) -> list[str] | None:
        """Return the names of states other than flags that had changed by `meet`; `None` if unknown."""
        if self._before is None or self._now is None:
            return None
        before, now = self._before.read(), self._now.read()
        return [name for name in before | now if before.get(name) != now.get(name)][:_SHOWN]


def check(reports: Sequence[ExitReport], names: Sequence[int], rank: int) -> None:
    """Raise on all ranks if one has changed an object while another one, still in its loop, has yet to change it.

    Args:
        reports: The ranks' messages, by rank.
        names: The ranks' names in errors.
        rank: This rank.

    Raises:
        JoinError: A rank has changed an object too early.
    """
    inside = [rank for rank, (has_left, _, _) in enumerate(reports) if not has_left]
    early = [rank for rank, (_, _, has_stepped) in enumerate(reports) if has_stepped or inside]
    # A rank that owns a shard has sent its change to the others, with the parameters that it stepped for them.
    inside = inside or [rank for rank in range(len(reports)) if early and rank not in early]
    unknown = [rank for rank in early if reports[rank][1] is None]
    changed = {rank: objects for rank in early if (objects := reports[rank][1])}
    if inside and changed:
        what = "; ".join(dict.fromkeys(name for objects in changed.values() for name in objects))
        ranks, others = (name_ranks(names[rank] for rank in group) for group in (changed, inside))
        raise JoinError(
            f"{ranks[0].upper()}{ranks[1:]} left the loop with `break` and then changed {what} while {others} were"
            " still in the loop, so the change would be lost or applied twice. Make it before the `break`, after"
            " another loop over join.batches, or after the `with`."
        )
    if inside and unknown and rank == 0:
        ranks, others = (name_ranks(names[rank] for rank in group) for group in (unknown, inside))
        JoinDriftWarning.warn(
            f"Join cannot tell whether {ranks} changed any state after its last batch, because its loop's iterator"
            f" was held in a variable. {others}, still in the loop, would repeat or undo such a change. Loop with"
            " `for batch in join.batches(loader)`, or `del` the iterator after the loop."
        )


def digests_of(states: Sequence[Any] | None) -> Digests | None:
    """Return digests of the states, or `None` after any error: this may run while an exception closes a generator."""
    if states is None:
        return None
    trees: dict[str, Any] = {}
    try:
        capture = Capture(canonical=True, local=frozenset(map(id, ignored_parameters(states).values())))
        with torch.inference_mode(False), torch.no_grad():
            for name, thing in named(states):
                kind = kind_of(thing)
                state = kind.capture(thing, capture, name).state
                # A model's state is one dictionary of parts; an optimizer's is a list of them, one per optimizer in it.
                wholes = [{"state": state}] if kind.name not in ("model", "optimizer") else state
                for part in [wholes] if isinstance(wholes, dict) else wholes:
                    for key, tree in part.items():
                        if key not in _FLAGS:
                            trees.setdefault(f"{name}: {_NAMES.get(key, key)}", []).append(tree)
            return Digests(trees, capture.tensors)
    except Exception:
        return None


def _read(objects: Sequence[Any]) -> dict[nn.Module | Tensor, bool]:
    """Return the flags of the modules and parameters in some objects."""
    modules = [module for thing in objects if isinstance(thing, nn.Module) for module in thing.modules()]
    return {m: m.training for m in modules} | {p: p.requires_grad for m in modules for p in m.parameters(recurse=False)}
