"""The steps of a loop in which a rank has synced gradients, and whether different steps were averaged together.

With certain lengths, ranks do not meet in a step, and DDP averages the k-th backward of each rank with the k-th of the
others. Once a rank skips one, its gradients are averaged with those of other steps.
"""

from collections.abc import Mapping, Sequence

from torch_join._base.errors import name_ranks

_MOST = 64
Synced = tuple[list[tuple[int, int]], int]  # see `SyncedSteps`: `gaps` and `last`


class SyncedSteps:
    """The steps of a loop in which this rank has synced a model's gradients.

    Attributes:
        gaps: The first few dozen gaps: the first step without a sync, and the next step with one.
        last: The last step that this covers.
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []
        self.last = -1

    def end_gap(self, step: int) -> None:
        """Record that this rank syncs in a step, but did not in the steps since the last sync."""
        if len(self.gaps) < _MOST:
            self.gaps.append((self.last + 1, step))
            self.last = step


def explain_mixed(by_rank: Mapping[int, Sequence[Synced]], names: Sequence[int]) -> str:
    """Return text for an error if some ranks synced in different steps and have mixed gradients since; else "".

    Args:
        by_rank: By rank, the `SyncedSteps` of each model.
        names: By rank, its number in the whole job.
    """
    of_models = (dict(zip(by_rank, model, strict=True)) for model in zip(*by_rank.values(), strict=False))
    return next(filter(None, (_explain_mixed(each, names) for each in of_models)), "")


def _explain_mixed(by_rank: Mapping[int, Synced], names: Sequence[int]) -> str:
    """Return the text for one model."""
    for step in sorted({step for gaps, _ in by_rank.values() for gap in gaps for step in gap}):
        without = [rank for rank, (gaps, _) in by_rank.items() if any(first <= step < end for first, end in gaps)]
        others = [rank for rank, (_, last) in by_rank.items() if rank not in without and step <= last]
        if without and others:
            skipped, synced = (name_ranks(names[rank] for rank in ranks) for ranks in (without, others))
            return (
                f" {skipped.capitalize()} did not sync gradients in step {step} of the loop, but {synced} did. Since"
                " then, gradients of different steps have been averaged together, so do not use the parameters."
            )
    return ""
