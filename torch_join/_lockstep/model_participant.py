"""A DDP model in a loop that a framework runs: its forward and backward are shadowed without announcements."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_join._compat import ddp as _compat
from torch_join._participants._gradients.pieces import FIRED, Pieces
from torch_join._participants._gradients.watch import Watch
from torch_join._participants.participant import Driver, Participant
from torch_join._shadow.buffer_news import Buffer, take
from torch_join._shadow.model_shadow import ModelShadow


class LockstepModelParticipant(Participant):
    """A `DistributedDataParallel` model whose steps all ranks run.

    Every rank knows from the meeting before a step that it has a forward and a backward, so these are not announced.

    Attributes:
        shadow: Runs in place of the model's step.
        has_news: Whether this step has changed the form of buffers, whose contents joined ranks lack.
        has_frozen: Whether this step has frozen or unfrozen parameters, on a joined rank.
    """

    kinds: ClassVar[dict[str, Any]] = {
        **Pieces.kinds,
        "buffers": list[Buffer],
        "given": list[Buffer] | None,
        "frozen": list[int],
    }
    in_pieces = True

    def __init__(self, driver: Driver, index: int, shadow: ModelShadow) -> None:
        super().__init__(driver, index)
        self.use(shadow)
        self.has_news = self.has_frozen = False

    def use(self, shadow: ModelShadow) -> None:
        """Use another shadow."""
        self.shadow = shadow
        self._pieces = Pieces(self, shadow)

    @property
    def owned(self) -> list[str]:
        return _compat.ignored_and_trained(self.shadow.ddp)

    def exit(self) -> None:
        super().exit()
        self._pieces.reset()

    @contextmanager
    def telling_changes(self) -> Iterator[None]:
        """Wrap an active rank's forward, and announce its changes to joined ranks.

        These are changes to buffers that DDP broadcasts, and the parameters that the forward freezes.
        """
        broadcasts, frozen = _compat.broadcasts_buffers(self.shadow.ddp), self.shadow.frozen
        if broadcasts:
            self.shadow.news.begin(self.shadow.inner)
        yield
        if self.shadow.frozen != frozen:
            self.announce("frozen", self.shadow.frozen)
        if broadcasts and (news := self.shadow.news.since(self.shadow.inner)) is not None:
            self.has_news = True
            self.announce("buffers", news)

    def give_buffers(self) -> None:
        """Copy buffers that the step has changed before its forward to all ranks; each active rank calls this."""
        self.announce("given", self.shadow.news.since(self.shadow.inner))
        with self.tail_log.own_collectives():
            self.shadow.sync_buffers(self.members.leader)

    @contextmanager
    def backward_in_pieces(self) -> Iterator[None]:
        """Wrap an active rank's backward that syncs, which joined ranks follow piece by piece."""
        task = -1

        def came(place: int, _: Any) -> None:
            nonlocal task
            if task == -1:
                self._pieces.begin(lambda: None)
            elif task != _compat.backward_in_progress():
                self._pieces.check_nested()
            task = _compat.backward_in_progress()
            self._pieces.came(place)

        watch = Watch(self.shadow.parameters)
        watch.begin(came)
        with ExitStack() as stack:
            stack.callback(watch.end)
            stack.callback(self._pieces.reset)
            yield

    def before_collective(self, ddps: bool) -> None:
        self._pieces.before_collective(ddps)

    @contextmanager
    def following_backward(self, output: Tensor) -> Iterator[None]:
        """Wrap a joined rank's part in such a backward; `output` is the result of its forward."""
        self._pieces.open(lambda: torch.autograd.backward(output))
        with ExitStack() as stack:
            stack.callback(self._pieces.reset)
            yield

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == FIRED:
            self._pieces.mirror(payload)
        elif kind == "frozen":
            self.has_frozen = True
            self.shadow.freeze(payload)
        else:
            take(payload, self.shadow.inner, self.shadow.parameters[0].device)
            if kind == "given":
                self.shadow.sync_buffers(self.members.leader)
            else:
                self.has_news = True
