"""A DDP model in a plain loop, on a rank that has joined: forwards and backwards are shadowed as they are announced."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.attributes import setting
from torch_join._participants._gradients.pieces import Pieces
from torch_join._participants._gradients.verdicts import Runs
from torch_join._participants.participant import Participant
from torch_join._shadow.buffer_news import Buffer, take
from torch_join._shadow.model_shadow import ModelShadow


class ShadowedSteps:
    """What a joined rank does for a model, in place of its steps.

    Args:
        participant: The model's part.
        ddp: The model.

    Attributes:
        shadow: What runs in place of the model's step.
        pieces: The backwards that come piece by piece.
        accumulates: Whether the last backward did not sync, on some rank.
        buffer_source: The lowest active rank in the last forward: it has the newest buffers.
    """

    kinds: ClassVar[dict[str, Any]] = {
        "forward": tuple[bool, bool, list[int], list[int], list[Buffer] | None],
        **dict.fromkeys(("backward", "gradients", "begin"), Runs),
        **dict.fromkeys(("ended", "reduced"), type(None)),
        **Pieces.kinds,
    }

    def __init__(self, participant: Participant, ddp: DistributedDataParallel) -> None:
        self._members = participant.members
        self._ddp = ddp
        self.shadow = ModelShadow(ddp, watches=False)
        self.pieces = Pieces(participant, self.shadow)
        self.accumulates = False
        self.buffer_source = 0
        self._parameters = self.shadow.parameters
        self._pending: list[Tensor] = []  # the outputs of shadow forwards that wait for a backward

    def forget(self) -> None:
        """Forget what waits for a backward: the tail is over."""
        self._pending.clear()
        self.shadow.news.forget()

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "forward":
            self._forward(*payload)
        elif kind == "backward":
            self._begin_backward()
            self.shadow.backward(self._run_pending)
            self._end_backward()
        elif kind == "begin":
            self._begin_backward()
            self.pieces.open(self._run_pending)
        elif kind == "fired":
            self.pieces.mirror(payload)
        elif kind == "ended":
            self.pieces.reset()
            self._end_backward()

    def _forward(
        self, grad: bool, sync: bool, sources: list[int], frozen: list[int], buffers: list[Buffer] | None
    ) -> None:
        self.buffer_source = self._members.leader
        # What another forward has trained still gets its gradient, in the backward that it waits for.
        self.shadow.freeze([place for place in frozen if not (self._pending and self._parameters[place].requires_grad)])
        take(buffers, self.shadow.inner, self._parameters[0].device)
        for source in sources:
            self.shadow.sync_buffers(source)
        with setting(self._ddp, require_backward_grad_sync=sync), torch.set_grad_enabled(grad):
            output = self.shadow.forward()
        if sync and output.requires_grad:  # else no backward comes through it
            self._pending.append(output)

    def _begin_backward(self) -> None:
        if not self._pending:
            # All were frozen in the forward that DDP has prepared for, and it averages what comes past that: of a later
            # forward under `no_sync`, or of a penalty on the parameters. It takes nothing less than all of them.
            self.shadow.freeze([])
            self._pending.append(self.shadow.zero())

    def _run_pending(self) -> None:
        torch.autograd.backward(self._pending)

    def _end_backward(self) -> None:
        self._pending.clear()
        self.accumulates = False
