"""What active ranks tell of their gradients when a backward begins, and how those that have joined follow.

The lowest one announces it. What the others have seen counts where that one has seen nothing.

At a backward that averages, to which all active ranks come, each leaves its words on those since the last such one, and
nobody waits. They are named by how many there have been: of backwards that do not average, others may leave some out.
A joined rank looks for them if it holds gradients of which the leader cannot tell whether they count; at a backward
that does not average it only notes that there was a doubt.

Words are kept for a while (`Channel.keep`): where the host does not wait for an average (on an accelerator, or where a
communication hook makes none), active ranks may be some backwards ahead of those that have joined.
"""

from torch_join._participants._gradients.evidence import Gradients, holds_something
from torch_join._participants._gradients.verdicts import (
    CLEARED,
    KEPT,
    UNKNOWN,
    Runs,
    common_verdict,
    runs_of,
    states_of,
)
from torch_join._participants.participant import Driver

_Word = tuple[int, str]  # the number of active ranks, and a verdict


class OtherVerdicts:
    """The words of one model's part.

    Args:
        driver: What the part belongs to.
        index: The part's.
        shards: Whether each rank's gradients are of another shard: one that is zero may be nothing elsewhere.
    """

    def __init__(self, driver: Driver, index: int, shards: bool = False) -> None:
        self._clears = (CLEARED, UNKNOWN) if shards else (CLEARED,)
        self._driver = driver
        self._index = index
        self._words: list[_Word] = []  # of the backwards since the last one that averaged
        self._doubted = 0  # with how many active ranks this one, which has joined, had its first doubt since then
        self._averages = 0  # in all tails: no name is used twice

    def found(self, gradients: Gradients, averages: bool) -> Runs:
        """Return what an active rank announces of its gradients when a backward begins.

        Raises:
            JoinError: They were changed in a way that joined ranks do not know of.
        """
        states = gradients.states()
        gradients.raise_if_changed(states, self._driver.members)
        # Whoever asks waits for all of them, also for ranks that have left out what it has accumulated.
        self.leave(common_verdict([state.verdict for state in states]), averages)
        return runs_of(states)

    def follow(self, gradients: Gradients, runs: Runs, averages: bool, accumulates: bool) -> None:
        """Do, on a joined rank, to its gradients what the active ranks have done to theirs when a backward begins.

        Args:
            gradients: This rank's.
            runs: What they have announced.
            averages: Whether the backward does.
            accumulates: Whether this rank holds something of its own: a share that was not averaged yet, or a shard.
        """
        states = states_of(runs, len(gradients.parameters))
        verdict = self.begin_average() if averages else None
        if verdict == UNKNOWN and any(holds_something(p.grad) for p in gradients.parameters):
            gradients.raise_unknown()
        for parameter in gradients.parameters if verdict in self._clears else ():
            parameter.grad = None
        gradients.raise_if_differing(states, accumulates, self._driver.joined_amid)
        gradients.follow(states, accumulates, self.ask if averages else self.doubt)

    def leave(self, verdict: str, averages: bool) -> None:
        """Leave a word on an active rank that is about to announce a backward."""
        word = len(self._driver.members.active), verdict
        if self._words[-1:] != [word]:
            self._words.append(word)
        if averages:
            self._averages += 1
            self._driver.tail_log.channel.keep(self._key, self._words)
            self._words = []

    def reset(self) -> None:
        """The tail is over."""
        self._words, self._doubted = [], 0

    def doubt(self) -> str:
        """Note, on a joined rank, that the leader cannot tell at a backward that does not average; keep it for now."""
        self._doubted = self._doubted or len(self._driver.members.active)
        return KEPT

    def begin_average(self) -> str:
        """Begin a backward that averages, on a joined rank; return the verdict on what was in doubt before, if it was.

        Raises:
            PeerFailedError: An active rank has failed.
            JoinTimeoutError: One of them has not come to this backward.
        """
        self._averages += 1
        since, self._doubted = self._doubted, 0
        if not since:
            return KEPT
        found = [{verdict for active, verdict in words if active <= since} for words in self._ask()]
        return common_verdict(next((one for one in (CLEARED, UNKNOWN, KEPT) if one in each), UNKNOWN) for each in found)

    def ask(self) -> str:
        """Return all active ranks' verdict at the backward that `begin_average` has begun; raises as that does."""
        return common_verdict(words[-1][1] for words in self._ask())

    def _ask(self) -> list[list[_Word]]:
        channel, active = self._driver.tail_log.channel, self._driver.members.active
        return [words for words in channel.ask(self._key, active, list[_Word]).values() if words]

    @property
    def _key(self) -> str:
        return f"gradients/{self._index}/{self._averages}"
