"""SIGTERM without a collective inside the signal handler."""

import logging
from types import FrameType

from lightning_join._compat import SignalConnector

log = logging.getLogger(__name__)


class JoinSignalConnector(SignalConnector):
    """Shows Lightning a SIGTERM when all ranks have heard of it.

    Lightning's handler broadcasts, on the one rank that was signalled, into whatever is under way, and
    its loops raise on that rank alone. Here the signal goes around with the loops' next meeting.
    """

    signalled = False  # this rank has received the signal
    agreed = False  # all ranks know that one has

    @property
    def received_sigterm(self) -> bool:
        return self.agreed

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:
        self.signalled = self.agreed = value

    def _sigterm_notifier_fn(self, signum: int, _: FrameType | None) -> None:
        log.info("Rank %d received SIGTERM.", self.trainer.global_rank)
        if not self.signalled and (launcher := self.trainer.strategy.launcher) is not None:
            launcher.kill(signum)
        self.signalled = True
