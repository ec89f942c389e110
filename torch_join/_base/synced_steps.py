"""At which steps of a loop a rank has synced gradients, and whether ranks have averaged those of different steps.

Where lengths are certain ranks do not meet in a step, and DDP averages each rank's k-th backward with the others' k-th:
a rank that leaves one out goes on with the gradients of a later step.
"""

from collections.abc import Mapping, Sequence

from torch_join._base.errors import name_ranks

_MOST = 64
Runs = list[tuple[int, bool]]  # from which step on a rank has synced in each, or in none


class SyncedSteps:
    """Those of this rank, in the current loop.

    Attributes:
        last: The step in which it has synced last.
        did: Whether it has synced in the step before the current one; `None` in the first.
        runs: Its steps but the current one; the first few dozen changes.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a loop."""
        self.last, self.runs = -1, Runs()
        self.did: bool | None = None

    def note(self, step: int) -> None:
        """Note a step that is over, and in which it has done otherwise than in the one before."""
        self.did = self.last == step
        if len(self.runs) < _MOST:
            self.runs.append((step, self.did))


def explain_mixed(said: Mapping[int, tuple[Runs, int]], names: Sequence[int]) -> str:
    """Return what to say of ranks that have synced at different steps, and since then each one's next with another's.

    Args:
        said: By rank, its runs, and how many steps are over.
        names: By rank, its number in the whole job.
    """
    over = min((steps for _, steps in said.values()), default=0)
    known = min((runs[-1][0] + 1 for runs, _ in said.values() if len(runs) == _MOST), default=over)
    for step in sorted({step for runs, _ in said.values() for step, _ in runs if step < min(over, known)}):
        did = {rank: [did for first, did in runs if first <= step][-1:] for rank, (runs, _) in said.items()}
        without, others = ([rank for rank, last in did.items() if last == [which]] for which in (False, True))
        if without and others and any(then and first > step for rank in without for first, then in said[rank][0]):
            skipped, synced = (name_ranks(names[rank] for rank in ranks) for ranks in (without, others))
            return (
                f" {skipped.capitalize()} did not sync gradients in step {step} of the loop, and {synced} did. From"
                " there on the gradients of different steps have been averaged: the parameters are not to be used."
            )
    return ""
