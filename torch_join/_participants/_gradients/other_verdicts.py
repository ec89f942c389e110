"""Active ranks' reports on their gradients at the start of a backward, and how joined ranks follow.

The lowest active rank announces its report. If it has no evidence, that of the other active ranks counts.

At a backward that averages, which all active ranks run, each of them stores its verdicts since the last such backward,
without waiting. The key is the number of such backwards so far, since ranks may skip backwards that do not average. A
joined rank reads the verdicts if the leader does not know whether that rank's gradients still count. At a backward that
does not average, it only notes the doubt.

Ranks keep verdicts for a while (`Channel.keep`): if the host does not wait for an average (on an accelerator, or if a
communication hook makes none), active ranks may be some backwards ahead of joined ones.
"""

from torch_join._participants._gradients.evidence import (
    CLEARED,
    KEPT,
    UNKNOWN,
    Gradients,
    Runs,
    common_verdict,
    holds_something,
    runs_of,
    states_of,
)
from torch_join._participants.participant import Driver

_Verdict = tuple[int, str]  # the number of active ranks, and a verdict


class OtherVerdicts:
    """The verdicts about one model.

    Args:
        driver: The participant's driver.
        index: The participant's index.
        shards: Whether each rank's gradients belong to another shard; a gradient that is zero here may be none there.
    """

    def __init__(self, driver: Driver, index: int, shards: bool = False) -> None:
        self._clears = (CLEARED, UNKNOWN) if shards else (CLEARED,)
        self._driver = driver
        self._index = index
        self._verdicts: list[_Verdict] = []  # from the backwards since the last one that averaged
        self._doubted = 0  # the number of active ranks at this joined rank's first doubt since then
        self._averages = 0  # counted over all tails, so that no key is used twice

    def found(self, gradients: Gradients, averages: bool) -> Runs:
        """Return an active rank's announcement about its gradients at the start of a backward, and store its verdict.

        Raises:
            JoinError: User code has changed the gradients in a way that joined ranks cannot know.
        """
        states = gradients.states()
        gradients.raise_if_changed(states, self._driver.members)
        # A rank that asks waits for all active ranks, even for those that have left out its accumulated gradients.
        verdict = len(self._driver.members.active), common_verdict(state.verdict for state in states)
        if self._verdicts[-1:] != [verdict]:
            self._verdicts.append(verdict)
        if averages:
            self._averages += 1
            self._driver.tail_log.channel.keep(self._key, self._verdicts)
            self._verdicts = []
        return runs_of(states)

    def follow(self, gradients: Gradients, runs: Runs, averages: bool, accumulates: bool) -> None:
        """Repeat on a joined rank, at the start of a backward, what the active ranks have done to their gradients.

        Args:
            gradients: This rank's gradients.
            runs: The active ranks' announcement.
            averages: Whether the backward averages.
            accumulates: Whether this rank's gradients are its own: a share that was not averaged yet, or a shard.
        """
        states = states_of(runs, len(gradients.parameters))
        verdict = self.begin_average() if averages else None
        if verdict == UNKNOWN and any(holds_something(p.grad) for p in gradients.parameters):
            gradients.raise_unknown()
        for parameter in gradients.parameters if verdict in self._clears else ():
            parameter.grad = None
        gradients.raise_if_differing(states, accumulates, self._driver.joined_mid_step)
        gradients.follow(states, accumulates, self.ask if averages else self.doubt)

    def reset(self) -> None:
        """End the tail."""
        self._verdicts, self._doubted = [], 0

    def doubt(self) -> str:
        """Note, on a joined rank, that the leader is in doubt at a backward that does not average; return `KEPT`."""
        self._doubted = self._doubted or len(self._driver.members.active)
        return KEPT

    def begin_average(self) -> str:
        """Start a backward that averages, on a joined rank; return the verdict on any earlier doubt.

        Raises:
            PeerFailedError: An active rank has failed.
            JoinTimeoutError: An active rank has not come to this backward.
        """
        self._averages += 1
        since, self._doubted = self._doubted, 0
        if not since:
            return KEPT
        found = [{verdict for active, verdict in verdicts if active <= since} for verdicts in self._ask()]
        return common_verdict(next((one for one in (CLEARED, UNKNOWN, KEPT) if one in each), UNKNOWN) for each in found)

    def ask(self) -> str:
        """Return all active ranks' verdict at the backward that `begin_average` has started, with the same errors."""
        return common_verdict(verdicts[-1][1] for verdicts in self._ask())

    def _ask(self) -> list[list[_Verdict]]:
        channel, active = self._driver.tail_log.channel, self._driver.members.active
        return [verdicts for verdicts in channel.ask(self._key, active, list[_Verdict]).values() if verdicts]

    @property
    def _key(self) -> str:
        return f"gradients/{self._index}/{self._averages}"
