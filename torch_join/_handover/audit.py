"""Checks whether the ranks are still replicas, by comparing values rather than by looking for known mistakes.

A handover makes ranks equal, so a check after it cannot find earlier mistakes. So digests are taken twice: at the step
at which the first rank joins, when all have run the same steps, and right after the handover. The ranks send both in
one message at the end of the tail, and names of values only if digests differ.

when a rank joins     parameters of the given models and optimizers; if ranks look at the top of
                      a step, also their state, hyperparameters, schedulers, scalers, frozen and training flags
after the handover    all of these again, with every bit; buffers; which `.grad` are None; and attributes
                      of the given objects and forgotten objects, if they were equal on all ranks before
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.errors import JoinDriftWarning, name_ranks
from torch_join._base.pytree import Slot, leaves
from torch_join._control.channel import Channel
from torch_join._handover.buffers import UnsyncedBuffers
from torch_join._handover.digest import checksums, hash_of
from torch_join._handover.forgotten import Forgotten
from torch_join._handover.reachable import reachable
from torch_join._handover.replicas import ignored_parameters, kind_of, named
from torch_join._handover.state import Capture

Often = Literal["tail"] | bool
Items = dict[str, str]  # the name of a value, and a short form of the value
Leaves = dict[str, Any]  # the name of a value, and the value: a tensor or a plain one

_KINDS = ("model", "optimizer", "LR scheduler", "GradScaler")
_SHOWN = 8
_LENGTH = 40


class Audit:
    """Compares the ranks' replicas.

    Args:
        objects: Everything passed to `Join`, without metrics.
        often: `"tail"`: loops in which some rank joins before another. `True`: all loops. `False`: none.
        hands_over_ignored: Whether parameters that DDP ignores are handed over; `None`: those equal on all ranks.
        forgotten: See below.
        unsynced: The buffers that no wrapper synchronizes.
        shards: Sharded models, which are not handed over: only values attached to them are compared.

    Attributes:
        joined: The names of the ranks that ran out of inputs first.
        forgotten: The search for objects that the user may have left out.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        often: Often,
        hands_over_ignored: bool | None,
        forgotten: Forgotten | None = None,
        unsynced: UnsyncedBuffers | None = None,
        shards: Sequence[nn.Module] = (),
    ) -> None:
        self._objects = objects
        self._shards = shards
        self.forgotten = forgotten or Forgotten(objects)
        self._unsynced = unsynced
        self._often = often
        self._hands_over_ignored = hands_over_ignored
        self.forget()

    def forget(self) -> None:
        """Drop all state."""
        self._before: dict[str, Items] = {}
        self._ignored: list[int] | None = None  # checksums
        self.joined: list[int] = []
        self.forgotten.clear()

    def begin(self, joined: Sequence[int], settled: bool, untouched: bool = True) -> None:
        """Take digests, on every rank, at the step at which the first ranks join.

        Args:
            joined: The ranks that join.
            settled: Whether this is the top of a step, before any user code in it.
            untouched: Whether user code has changed nothing since the last step, as it may after this rank's `break`.
        """
        self.forget()
        self.joined = list(joined)
        if self._hands_over_ignored is None and (ignored := ignored_parameters(self._objects)):
            self._ignored = checksums(list(ignored.values()))
        if self._often:
            self.forgotten.search()
            values = self._state(settled) if untouched else {}
            self._before = _described({**values, "found": self._found()}, exact=False)

    def note(self, at_last: bool) -> None:
        """Record objects that this rank alone may keep, in case it runs out before others; see `Forgotten.note`."""
        if self._often:
            self.forgotten.note(at_last)

    def local(self, channel: Channel) -> frozenset[int]:
        """Return the `id` of each parameter that the handover leaves unchanged; every rank calls this."""
        ignored = list(ignored_parameters(self._objects).values())
        if not ignored or self._hands_over_ignored:
            return frozenset()
        answers = [None] if self._hands_over_ignored is False else channel.gather(self._ignored, of=list[int] | None)
        if None in answers:  # not wanted, or not in a tail
            return frozenset(map(id, ignored))
        alike = [len(set(sums)) == 1 for sums in zip(*answers, strict=True)]
        return frozenset(id(p) for p, is_alike in zip(ignored, alike, strict=True) if not is_alike)

    def end(
        self,
        channel: Channel,
        local: frozenset[int],
        has_gradients: bool,
        stepped: Sequence[int] | None = None,
        settled: bool = False,
    ) -> None:
        """Compare the ranks after the handover; every rank calls this.

        Args:
            channel: The channel between the ranks.
            local: The result of `local`.
            has_gradients: Whether the last backward has averaged the gradients.
            stepped: The ranks that were active in the last step, if known. A value that differs between these is local.
            settled: Whether the states are known to be equal, so that only other values are compared.
        """
        before, joined = self._before, self.joined
        if not self._often:
            self.forget()
            return
        parameters, rest = ({}, {}) if settled else self._captured(local, exact=True, with_rest=True)
        after = _described({"handed over": parameters | rest, "found": self._found()}, exact=True)
        after["gradients"] = self._gradients() if has_gradients else {}
        kept = self.forgotten.kept
        self.forget()
        when = f"When {name_ranks(joined)} ran out of inputs"
        found = _differences(channel, {"parameters": {}, "settled": {}, **before}, after, kept)
        if stepped is not None:
            found[2] = {name: row for name, row in found[2].items() if len({row[rank] for rank in stepped}) == 1}
        texts = zip((_DIFFERED, _LOSSY, _STALE, _EMPTY, _ALONE), found, strict=True)
        remarks = [text.format(when=when, what=_list(items, channel.global_ranks)) for text, items in texts if items]
        if self._unsynced is not None and self._unsynced.undecided:
            remarks.append(_UNDECIDED.format(what=", ".join(self._unsynced.undecided[:_SHOWN])))
        self._warn(channel, remarks)

    def even(self, channel: Channel, has_gradients: bool, left: bool = False) -> None:
        """Compare, on every rank, at the end of a loop in which no rank has joined before another.

        Args:
            channel: The channel between the ranks.
            has_gradients: Whether the last backward has averaged the gradients.
            left: Whether this rank has left the loop by `break`. It is not compared with ranks that came to the end.
        """
        if self._often is True:
            state = _described(self._state(settled=True), exact=False)
            state["gradients"] = self._gradients() if has_gradients else {}
            if left:
                state = {f"{key}, after a break": items for key, items in state.items()}
            found, *_ = _differences(channel, {**state, "found": {}}, {})
            self._warn(
                channel,
                [_DIFFERED.format(when="After an even loop", what=_list(found, channel.global_ranks))] if found else [],
            )

    def _warn(self, channel: Channel, remarks: list[str]) -> None:
        if remarks and channel.rank == 0:
            JoinDriftWarning.warn(" ".join(remarks))

    # ------------------------------------------------------------ the state

    def _state(self, settled: bool) -> dict[str, Leaves]:
        local = frozenset(map(id, ignored_parameters(self._objects).values()))
        parameters, rest = self._captured(local, exact=False, with_rest=settled)
        return {"parameters": parameters, "settled": rest}

    def _captured(self, local: frozenset[int], exact: bool, with_rest: bool) -> tuple[Leaves, Leaves]:
        """Return the parameters and, if `with_rest`, all other state; buffers only if `exact`."""
        capture = Capture(canonical=True, local=local)
        parameters, rest = Leaves(), Leaves()
        names: dict[int, str] = {}
        for name, thing in named(self._objects):
            kind = kind_of(thing)
            if kind.name not in _KINDS or not (with_rest or kind.name in _KINDS[:2]):
                continue
            try:
                state = kind.capture(thing, capture, name).state
            except Exception:
                continue
            for one, tree in enumerate(state) if isinstance(state, list) else ((0, state),):
                parts = tree if kind.name in _KINDS[:2] else {"state_dict()": tree}
                for part, content in parts.items():
                    if part == "parameters":
                        for key, slot in content.items():
                            names.setdefault(slot.index, f"{name}: {key}")
                            parameters.setdefault(names[slot.index], capture.tensors[slot.index])
                    elif with_rest and (exact or part not in ("buffers", "extra")):
                        prefix = f"{name}: {part}" if not one else f"{name}: {part} of optimizer {one} in it"
                        for path, leaf in leaves(content, prefix):
                            if isinstance(leaf, Slot):
                                rest[names.setdefault(leaf.index, path)] = capture.tensors[leaf.index]
                            else:
                                rest[path] = hash_of(leaf) if isinstance(leaf, bytes) else leaf
        return parameters, rest

    def _found(self) -> Leaves:
        leaves = Leaves()
        local = frozenset(map(id, ignored_parameters(self._objects).values()))
        own = {id(p) for thing in self._objects if isinstance(thing, nn.Module) for p in thing.parameters()}
        for name, thing in named([*self._objects, *self._shards]):
            try:
                values = dict(reachable(thing, name, local))
            except Exception:
                continue
            if any(thing is shard for shard in self._shards):  # a tensor may be without memory now
                values = {path: value for path, value in values.items() if not isinstance(value, Tensor)}
            leaves |= {path: value for path, value in values.items() if id(value) not in own}
        leaves.update(self.forgotten.values())
        leaves.update(() if self._unsynced is None else self._unsynced.doubtful())
        return leaves

    def _gradients(self) -> Items:
        return {
            f"{name}: .grad of {key}": "None" if p.grad is None else "there"
            for name, thing in named(self._objects)
            if isinstance(thing, DistributedDataParallel)
            for key, p in thing.module.named_parameters()
            if p.requires_grad and key not in thing.parameters_to_ignore
        }


_DIFFERED = (
    "{when}, the ranks already differed in {what}, so they had trained differently before that. Objects passed to"
    " Join are identical again after the tail. Usual causes: a value in the loop that differs between ranks"
    " (len(loader), the rank's loss, a counter), a parameter changed outside DDP, or two backwards after one forward."
)
_LOSSY = (
    "After the handover, the ranks still differ in {what}. Fix the object's load_state_dict, which does not restore"
    " what its state_dict returned."
)
_STALE = (
    "After the tail of a loop, the ranks differ in {what}, which was identical before, because finished ranks did not"
    " run your code. If it affects training, pass it to Join: Join([model, optimizer, it]); wrap it in an object with"
    " state_dict and load_state_dict if needed. For buffers that neither DDP nor FSDP broadcasts, pass"
    " hand_over_buffers=True to make them identical, or False to keep each rank's own."
)
_EMPTY = (
    "After the tail of a loop, the ranks differ in {what}: an optimizer steps a parameter whose gradient is zero, but"
    " skips one whose gradient is None. Use zero_grad(set_to_none=True)."
)

_ALONE = (
    "An average was not updated in the tail of a loop, because only some ranks keep it and these had finished:"
    " {what}. Keep it on all ranks, update it in each step, and pass it to Join. (Ignore this warning if it is not an"
    " average, or not updated in each step.)"
)
_UNDECIDED = (
    "In the tail of a loop, each rank kept its own {what}. Code changed these buffers before the step's forward, in"
    " which DDP broadcasts them, so Join cannot tell whether they were identical before. Pass hand_over_buffers=True"
    " to make them identical on all ranks, or False to keep each rank's own."
)


def _described(parts: dict[str, Leaves], exact: bool) -> dict[str, Items]:
    # A tensor with several names is hashed once.
    tensors = {id(leaf): leaf for leaves in parts.values() for leaf in leaves.values() if isinstance(leaf, Tensor)}
    with torch.no_grad():
        sums = dict(zip(tensors, checksums([*tensors.values()], exact), strict=True))
    return {
        key: {
            name: f"#{sums[id(leaf)] & 0xFFFFFFFFFFFFFFFF:x} {tuple(leaf.shape)}"
            if isinstance(leaf, Tensor)
            else _short(leaf + 0.0 if isinstance(leaf, float) else leaf)
            for name, leaf in leaves.items()
        }
        for key, leaves in parts.items()
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"#{hash_of(text.encode())}"


def _differences(
    channel: Channel, before: dict[str, Items], after: dict[str, Items], kept: Items | None = None
) -> list[dict[str, list[Any]]]:
    """Return the differences by rank: at the join, in the state handed over, in found values, gradients, averages."""
    described = {f"before, {key}": items for key, items in before.items()} | after
    digests = {key: hash_of(repr(sorted(items.items())).encode()) if items else "" for key, items in described.items()}
    kept = kept or {}
    digests["kept"] = "asked" if {"changed", "unknown"} & {*kept.values()} else ""
    all_digests = channel.gather(digests, of=dict[str, str])
    held = channel.gather(kept, of=Items) if any(each.pop("kept", "") for each in all_digests) else []
    alone = {name: row for name, row in _unlike(held).items() if None in row and {"changed", "unknown"} & {*row}}
    # A digest that one rank lacks is not compared.
    known = [key for key in digests if all(each.get(key) for each in all_digests)]
    differing = [key for key in known if len({each[key] for each in all_digests}) > 1]
    wanted = [key for key in differing if key != "before, found" and (key != "found" or "before, found" in known)]
    result = {key: _unlike(channel.gather(described[key], of=Items)) for key in wanted}
    if "found" in result:
        result["found"] = _alike_before(channel.gather(before["found"], of=Items), result["found"])
    at_join = {name: row for key in result if key.startswith("before, ") for name, row in result[key].items()}
    return [at_join, *(result.get(key, {}) for key in ("handed over", "found", "gradients")), alone]


def _alike_before(by_rank: list[Items], found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the values that differ now, and were equal on all ranks before, or are new and equal where present."""
    before = _unlike(by_rank)
    usual = by_rank[0].keys() - before.keys()
    known = set().union(*by_rank)
    # Lists of a rank's own items, such as the outputs of its steps, and empty lists that may get such items.
    own = {name[:place] for name in before for place, letter in enumerate(name) if letter == "["}
    own |= {name[4:-1] for name in usual if name.startswith("len(") and by_rank[0][name] == "0"}
    lists = tuple(f"{name}[" for name in own if f"len({name})" in known)
    return {
        name: values
        for name, values in found.items()
        if not (f"{name[4:-1]}[" if name.startswith("len(") else name).startswith(lists)
        # An item that was added to a list shows in the list's length.
        and (
            name in usual
            or not (name in known or len({*values} - {None}) > 1 or f"len({name.rpartition('[')[0]})" in known)
        )
    }


def _unlike(by_rank: list[Items]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for items in by_rank for name in items)
    table = {name: [items.get(name) for items in by_rank] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _list(found: dict[str, list[Any]], names: Sequence[int]) -> str:
    by_thing: dict[str, list[str]] = {}
    for name, values in list(found.items())[:_SHOWN]:
        thing, _, what = name.rpartition(": ")
        by_thing.setdefault(thing, []).append(_value(what, values, names))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(f"{thing}: {', '.join(what)}".removeprefix(": ") for thing, what in by_thing.items()) + more


def _value(name: str, values: list[Any], names: Sequence[int]) -> str:
    if any(value is not None and value.startswith("#") for value in values):
        return name
    described = ", ".join(f"{value or 'missing'} on rank {rank}" for rank, value in zip(names, values, strict=True))
    return f"{name} ({described})"
