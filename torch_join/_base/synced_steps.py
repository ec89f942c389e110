"""At which steps of a loop a rank has synced gradients, and whether ranks have averaged those of different steps.

Where lengths are certain ranks do not meet in a step, and DDP averages each rank's k-th backward with the others' k-th:
a rank that leaves one out goes on with the gradients of a later step.
"""

from collections.abc import Mapping, Sequence

from torch_join._base.errors import name_ranks

_MOST = 64
Synced = tuple[list[tuple[int, int]], int]  # see `SyncedSteps`: the gaps, and the last


class SyncedSteps:
    """Those of this rank, in a loop.

    Attributes:
        gaps: Of steps without: each one's first, and the next step in which it has synced. The first few dozen.
        last: The last step, as far as these go.
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []
        self.last = -1

    def end_gap(self, step: int) -> None:
        """Note that this rank syncs in a step, and did not in those since the last."""
        if len(self.gaps) < _MOST:
            self.gaps.append((self.last + 1, step))
            self.last = step


def explain_mixed(said: Mapping[int, Synced], names: Sequence[int]) -> str:
    """Return what to say of ranks that have synced at different steps, and since then each one's next with another's.

    Args:
        said: By rank, its `SyncedSteps`.
        names: By rank, its number in the whole job.
    """
    for step in sorted({step for gaps, _ in said.values() for gap in gaps for step in gap}):
        without = [rank for rank, (gaps, _) in said.items() if any(first <= step < end for first, end in gaps)]
        others = [rank for rank, (_, last) in said.items() if rank not in without and step <= last]
        if without and others:
            skipped, synced = (name_ranks(names[rank] for rank in ranks) for ranks in (without, others))
            return (
                f" {skipped.capitalize()} did not sync gradients in step {step} of the loop, and {synced} did. From"
                " there on the gradients of different steps have been averaged: the parameters are not to be used."
            )
    return ""
