"""Saying which rank failed, and why, on all the others."""

from types import TracebackType

from torch_join._base.errors import JoinError, PeerFailedError, name_ranks, raise_any
from torch_join._compat import ddp as _compat
from torch_join._control.channel import Channel
from torch_join._control.peers import SILENT


class telling_failures:  # noqa: N801  it is used like a function
    """Tell the other ranks if the body raises, and say whose failure a broken collective comes from.

    Raises:
        PeerFailedError: In place of a communication error, if another rank has failed.
        JoinError: The same, if what the ranks say of themselves explains it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        channel, reason = self._channel, error
        if _compat.is_communication_error(error):
            answers, silent = channel.health()  # the rank that broke the collective may still be writing why
            try:
                raise_any(channel.failure())
            except JoinError as failure:
                raise failure from error
            names = channel.global_ranks
            if silent:
                channel.fail(SILENT, silent[0])
                raise PeerFailedError(
                    f"A collective failed on rank {names[channel.rank]}, and"
                    f" {name_ranks(names[rank] for rank in silent)} did not answer since:"
                    " killed, or stopped. Its own log says why.",
                    names[silent[0]],
                    SILENT,
                ) from error
            reason = channel.explain({names[rank]: status for rank, (_, status) in answers.items()}) or error
        channel.fail(reason)
        if reason is not error:
            try:
                raise reason from error
            finally:
                del reason  # which this frame would keep, and it this frame
