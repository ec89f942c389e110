"""SIGTERM without a collective inside the signal handler."""

import logging
from types import FrameType

from lightning_join._compat import SignalConnector

log = logging.getLogger(__name__)


class JoinSignalConnector(SignalConnector):
    """Lightning's handler broadcasts, on the one rank that was signalled, into whatever is under way.

    Here the flag goes around with the epoch loop's next exchange.
    """

    def _sigterm_notifier_fn(self, signum: int, _: FrameType | None) -> None:
        log.info("Rank %d received SIGTERM.", self.trainer.global_rank)
        if not self.received_sigterm and (launcher := self.trainer.strategy.launcher) is not None:
            launcher.kill(signum)
        self.received_sigterm = True
