"""SIGTERM, and SLURM's signal to requeue, without a collective inside the signal handler."""

import logging
import signal
from types import FrameType

from lightning.pytorch.trainer.states import TrainerFn

from lightning_join._compat import SignalConnector

log = logging.getLogger(__name__)


class JoinSignalConnector(SignalConnector):
    """Shows Lightning a signal once all ranks know of it.

    Lightning's handlers broadcast or save a checkpoint at once, wherever the code is, on the ranks that got the signal.
    Here the ranks share the signal at the loops' next meeting.
    """

    signalled = False  # this rank has received a SIGTERM
    agreed = False  # all ranks know that one has
    requeue_asked = False  # this rank has received SLURM's signal to requeue, or knows that another one has
    requeued = False  # in this fit; ranks get the signal at different times

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

    def _slurm_sigusr_handler_fn(self, signum: int, frame: FrameType | None) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.requeue_asked = True
        else:
            super()._slurm_sigusr_handler_fn(signum, frame)  # type: ignore[arg-type]

    def begin_fit(self) -> None:
        self.requeue_asked = self.requeued = False

    def requeue(self) -> None:
        """Save a checkpoint, and ask SLURM to start the job again, as Lightning's handler does; all ranks call this."""
        self.requeued = True
        super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
