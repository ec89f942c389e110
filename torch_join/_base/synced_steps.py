"""At which steps of a loop a rank has synced gradients, and whether ranks have averaged those of different steps.

Where lengths are certain ranks do not meet in a step, and DDP averages each rank's k-th backward with the others' k-th:
a rank that leaves one out goes on with the gradients of a later step.
"""

from collections.abc import Mapping, Sequence

from torch_join._base.errors import JoinError, name_ranks

_MOST = 64
Runs = list[tuple[int, bool]]  # from which step on a rank has synced in each, or in none
Ended = tuple[list[tuple[int, bool]], int]  # and how many steps are over


class SyncedSteps:
    """Those of this rank, in the current loop.

    Attributes:
        last: The step in which it has synced last.
        runs: Its steps but the current one; the first few dozen changes.
        over: How many steps are over.
        accumulates: Whether it has run backwards that sync nothing.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a loop."""
        self.last, self.over = -1, 0
        self.runs: Runs = []
        self.accumulates = False

    def end_step(self, step: int) -> None:
        """Note that a step is over."""
        did, self.over = self.last == step, step + 1
        if (not self.runs or self.runs[-1][1] != did) and len(self.runs) < _MOST:
            self.runs.append((step, did))


def explain_mixed(said: Mapping[int, Ended], names: Sequence[int]) -> str:
    """Return what to say of ranks that have synced at different steps, and since then each one's next with another's.

    Args:
        said: By rank, its runs, and how many steps are over.
        names: By rank, its number in the whole job.
    """
    over = min((steps for _, steps in said.values()), default=0)
    known = min((runs[-1][0] + 1 for runs, _ in said.values() if len(runs) == _MOST), default=over)
    for step in sorted({step for runs, _ in said.values() for step, _ in runs if step < min(over, known)}):
        without = [
            rank for rank, (runs, _) in said.items() if not [did for first, did in runs if first <= step][-1:][0]
        ]
        later = any(did and first > step for rank in without for first, did in said[rank][0])
        if 0 < len(without) < len(said) and later:
            others = name_ranks(names[rank] for rank in said if rank not in without)
            return (
                f" {name_ranks(names[rank] for rank in without).capitalize()} did not sync gradients in step {step} of"
                f" the loop, and {others} did. From there on the gradients of different steps have been averaged: the"
                " parameters are not to be used."
            )
    return ""


def check_not_mixed(said: Sequence[Ended | None], names: Sequence[int]) -> None:
    """Compare what ranks say of a loop that all have gone through, and as many steps of it.

    Raises:
        JoinError: They have synced at different steps, so that gradients of different steps have been averaged.
    """
    known = {rank: ended for rank, ended in enumerate(said) if ended is not None}
    if len(known) == len(said) and (text := explain_mixed(known, names)):
        raise JoinError(
            f"In the last loop ranks have left out different batches.{text} Leave batches out within:"
            " join.batches(good(loader)); or give such a one a loss times zero."
        )
