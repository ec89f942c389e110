"""Log messages: which ranks have finished, the weight of the remaining steps, the cost of an uneven epoch."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

import torch

from torch_join._base.errors import name_ranks
from torch_join._base.membership import Membership
from torch_join._base.weighting import name_of
from torch_join._monitor.records import EpochRecord, RankRecord
from torch_join._participants.options import Options

LOG = logging.getLogger("torch_join")
SEEN: Counter[str] = Counter()  # per process, since each loop may have its own `Join`


class Remarks:
    """Logs one loop's messages on this rank. It sends nothing to other ranks, and an even step costs nothing.

    Args:
        members: The ranks.
        options: The user's options.
        framework: The name of the logger that shows these messages, unless the logger `torch_join` is configured.
        first: The loop's first step.

    Attributes:
        weighs_items: Whether the framework divides each step's loss by its number of items.
        may_rebalance: Whether `rebalance=True` is not set but allowed by the other options.
    """

    weighs_items = False

    def __init__(self, members: Membership, options: Options, framework: str = LOG.name, first: int = 0) -> None:
        self._members, self._options, self._framework, self._first = members, options, framework, first
        refuses = options.may_break or options.throw_on_early_termination or options.placeholder is not None
        self.may_rebalance = not (options.rebalance or refuses)
        self._begin, self._trains = time.monotonic(), torch.is_grad_enabled()  # read now: in a backward it may be off
        self._active: Sequence[int] = range(members.world_size)
        self._ended: dict[int, tuple[int, float]] = {}  # by finished rank, its batches and the second of its join

    def note(self, active: Sequence[int], step: int) -> None:
        """Note which ranks have a batch at an uneven step."""
        if not self._trains or not active or [*active] == [*self._active]:
            return
        now = step - self._first, time.monotonic() - self._begin
        world = range(self._members.world_size)
        self._ended = {rank: self._ended.get(rank, now) for rank in world if rank not in active}
        self._active = active
        SEEN["tails"] += 1
        if SEEN["tails"] == 1 and self._speaks:
            finished = name_ranks(self._members.named(self._ended)).capitalize()
            have, rest = "has" if len(self._ended) == 1 else "have", f"{len(active)} of {len(world)} ranks"
            self._log(f"{finished} {have} run out of batches; {rest} still have batches. {self._weight(len(active))}")

    def end(self, step: int) -> None:
        """Note the end of a loop that has trained; `step` is the number of the step that would have come next."""
        seconds = time.monotonic() - self._begin
        epoch, number = SEEN["epochs"], SEEN["uneven epochs"] + 1
        SEEN["epochs"] += 1
        if not self._ended:
            return
        SEEN["uneven epochs"] = number
        if number & (number - 1) or not self._speaks:
            return
        ends = [self._ended.get(rank, (step - self._first, seconds)) for rank in range(self._members.world_size)]
        record = EpochRecord.of(epoch, [RankRecord(batches, 0, batches, at, at) for batches, at in ends])
        saves = record.steps_to_save if self.may_rebalance else 0
        remedy = f" rebalance=True would save about {saves} of {record.steps} steps." if saves else ""
        self._log(f"{record}{remedy}")

    @property
    def _speaks(self) -> bool:
        return self._members.rank == self._active[0]

    def _weight(self, active: int) -> str:
        """Return a text about the weight of the tail's steps."""
        if self.weighs_items:
            return "The trainer divides each step's loss by its number of items, so each item counts the same."
        weighting, share = self._options.weighting, f"{active}/{self._members.world_size}"
        meaning = {
            "world": f"their steps are scaled by {share}; weighting='samples' counts each sample the same.",
            "active": "each step is the mean over the ranks that have a batch.",
            "samples": "each sample counts the same.",
        }
        text = (
            meaning.get(weighting, "")
            if isinstance(weighting, str)
            else "each batch has the weight that this function returns."
        )
        return f"{name_of(weighting)}: {text}"

    def _log(self, text: str) -> None:
        """Log a line through the framework's logger, or through `torch_join` if it has a level or handlers."""
        log = LOG if LOG.level or LOG.handlers else logging.getLogger(self._framework)
        if log.isEnabledFor(logging.INFO):
            log.handle(log.makeRecord(LOG.name, logging.INFO, __file__, 0, text, (), None))
