"""Stopping on all ranks together if a callback of only some ranks requests it."""

from typing import Any

import torch

from torch_join import JoinWarning
from torch_join.integration import Channel, name_ranks

_FLAGS = ("should_epoch_stop", "should_training_stop")


class Stopping:
    """Spreads stop requests in Trainer's `control` from some ranks to all.

    The ranks do not meet for this. Where Trainer reads the flags, each rank records whether it requests a stop. A
    requesting rank asks the others for their requests. If all request a stop, all stop here. Otherwise it has notified
    all ranks and continues to the next step. No rank finishes that step's backward without it, and all stop at its end.

    Args:
        channel: The ranks' channel.
        device: The device to wait for in each step if Trainer does not; otherwise a rank could be several steps ahead.
    """

    def __init__(self, channel: Channel, device: torch.device | None) -> None:
        self._channel, self._device = channel, device
        self._places, self._last = 0, -1
        self._held = [False, False]  # requests made during an accumulation
        self._asked = (False, False)  # this rank's requests that wait for the next step

    def begin_epoch(self) -> None:
        """Forget the requests to stop an epoch that has ended."""
        self._asked = False, self._asked[1]

    def hold(self, control: Any) -> None:
        """Postpone requests made during an accumulation to its end, where all ranks read them."""
        for place, flag in enumerate(_FLAGS):
            self._held[place] |= bool(getattr(control, flag))
            setattr(control, flag, False)

    def agree(self, control: Any, step: int) -> None:
        """Make the flags equal on all ranks; each rank calls this at the same places.

        Args:
            control: Trainer's `control`, which is changed.
            step: The number of the last optimizer step.
        """
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        channel, is_next, self._last = self._channel, step > self._last, step
        for flag, held in zip(_FLAGS, self._held, strict=True):
            setattr(control, flag, getattr(control, flag) or held)
        self._held = [False, False]
        wants = tuple(bool(getattr(control, name)) for name in _FLAGS)
        if is_next and channel.posted(f"stop/{step - 1}"):
            own = tuple(map(max, wants, self._asked))
            answers = channel.gather(own, of=tuple[bool, bool])
            self._asked = (False, False)
            for flag, each in zip(_FLAGS, zip(*answers, strict=True), strict=True):
                setattr(control, flag, any(each))
            asking = [rank for rank, each in enumerate(answers) if any(each)]
            if channel.rank == 0 and 0 < len(asking) < len(answers):
                JoinWarning.warn(
                    f"All ranks stop at step {step}, although only {name_ranks(asking)} requested it, at this step or"
                    " before. Request the stop on all ranks, based on a shared value."
                )
            return
        self._places += 1
        place, verdict = f"stop/at/{self._places}", f"stop/all/{self._places}"
        channel.keep(place, any(wants))
        if not any(wants):
            return
        others = [rank for rank in range(channel.world_size) if rank != channel.rank]
        channel.post(f"stop/{step}", None, lasts=True)
        if channel.rank == 0:
            agreed = all(channel.ask(place, others, bool).values())
            channel.keep(verdict, agreed)
        elif agreed := channel.ask(place, [0], bool)[0]:
            agreed = channel.ask(verdict, [0], bool)[0]
        else:
            channel.ask(place, others, bool)  # ranks that answer have received the request
        if not agreed:
            self._asked = wants[0] or self._asked[0], wants[1] or self._asked[1]
            for flag in _FLAGS:
                setattr(control, flag, False)
