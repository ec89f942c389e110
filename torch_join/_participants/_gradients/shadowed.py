"""A DDP model in a plain loop, on a joined rank, which shadows each forward and backward that is announced."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_join._base.attributes import setting
from torch_join._participants._gradients.pieces import Pieces
from torch_join._participants._gradients.verdicts import Runs
from torch_join._participants.participant import Driver, Participant
from torch_join._shadow.buffer_news import Buffer, take
from torch_join._shadow.model_shadow import ModelShadow


class ShadowedSteps(Participant):
    """The part of a model's participant that replaces the model's steps on a joined rank."""

    kinds: ClassVar[dict[str, Any]] = {
        "forward": tuple[bool, bool, list[int], list[int], list[Buffer] | None],
        **dict.fromkeys(("backward", "gradients", "begin"), Runs),
        **dict.fromkeys(("ended", "reduced"), type(None)),
        **Pieces.kinds,
    }
    accumulates = False  # whether the last backward did not sync, on some rank

    def __init__(self, driver: Driver, index: int, ddp: DistributedDataParallel) -> None:
        super().__init__(driver, index)
        self.ddp = ddp
        self._shadow = ModelShadow(ddp, watches=False)
        self._pieces = Pieces(self, self._shadow)  # the backwards that come piece by piece
        self._parameters = self._shadow.parameters
        self._buffer_source = 0  # the lowest active rank in the last forward, which has the newest buffers
        self._pending: list[Tensor] = []  # the outputs of shadow forwards that wait for a backward

    def mirror(self, kind: str, payload: Any) -> None:
        if kind == "forward":
            self._forward(*payload)
        elif kind == "backward":
            self._begin_shadow()
            self._shadow.backward(self._run_pending)
            self._end_shadow()
        elif kind == "begin":
            self._begin_shadow()
            self._pieces.open(self._run_pending)
        elif kind == "fired":
            self._pieces.mirror(payload)
        elif kind == "ended":
            self._pieces.reset()
            self._end_shadow()

    def _forward(
        self, grad: bool, sync: bool, sources: list[int], frozen: list[int], buffers: list[Buffer] | None
    ) -> None:
        self._buffer_source = self.members.leader
        # Parameters that an earlier, pending forward trains still get their gradients in its backward.
        parameters = self._parameters
        self._shadow.freeze([place for place in frozen if not (self._pending and parameters[place].requires_grad)])
        take(buffers, self._shadow.inner, parameters[0].device)
        for source in sources:
            self._shadow.sync_buffers(source)
        with setting(self.ddp, require_backward_grad_sync=sync), torch.set_grad_enabled(grad):
            output = self._shadow.forward()
        if sync and output.requires_grad:  # else no backward goes through it
            self._pending.append(output)

    def _begin_shadow(self) -> None:
        if not self._pending:
            # All parameters were frozen in the forward that prepared DDP. Now DDP averages other gradients, from a
            # later forward under `no_sync` or from a penalty on the parameters, and accepts only all of them.
            self._shadow.freeze([])
            self._pending.append(self._shadow.zero())

    def _run_pending(self) -> None:
        torch.autograd.backward(self._pending)

    def _end_shadow(self) -> None:
        self._pending.clear()
        self.accumulates = False
