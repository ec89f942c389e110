"""A `Joinable` that a user wrote according to torch's documentation."""

from typing import Any, ClassVar

from torch.distributed.algorithms.join import Joinable

from torch_join._compat.ddp import configure
from torch_join._participants.participant import Driver, Participant


class CustomParticipant(Participant):
    """A custom joinable; its `notify_join_context` announces that its collectives come next."""

    kinds: ClassVar[dict[str, Any]] = {"hook": None}

    def __init__(self, driver: Driver, index: int, joinable: Joinable, options: dict[str, Any]) -> None:
        super().__init__(driver, index)
        self.joinable = joinable
        self._options = options
        self.renew()

    def renew(self) -> None:
        """Ask the joinable for a new hook."""
        self._hook = self.joinable.join_hook(**self._options)

    def enter(self) -> None:
        self._undo.append(configure(self.joinable, _Announcing(self)))

    def mirror(self, kind: str, payload: Any) -> None:
        self.tail_log.run_hook(self._hook.main_hook)

    def after_all(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


class _Announcing:
    """A join configuration that announces the main hook's collectives.

    torch reads `is_first_joinable` at each `notify_join_context`.
    """

    enable = False
    throw_on_early_termination = False

    def __init__(self, participant: CustomParticipant) -> None:
        self._participant = participant

    @property
    def is_first_joinable(self) -> bool:
        participant = self._participant
        if not participant.members.serves:
            participant.driver.before_notice(participant)
            participant.announce("hook")
        return False
