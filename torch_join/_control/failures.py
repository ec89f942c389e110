"""Reports which rank failed, and why, on all other ranks."""

from types import TracebackType

from torch_join._base.errors import shorten_traceback
from torch_join._compat import ddp as _compat
from torch_join._control.channel import Channel


class telling_failures:  # noqa: N801  it is used like a function
    """Report an error in the body to the other ranks; for a broken collective, raise the failure that caused it.

    Raises:
        PeerFailedError: Instead of a communication error, if another rank has failed.
        JoinError: Instead of a communication error, if the ranks' statuses explain it.
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
            # The rank that broke the collective may still be writing the reason.
            reason = channel.find_why(f"A collective failed on rank {channel.global_ranks[channel.rank]}")[0] or error
        channel.fail(reason)
        shorten_traceback(reason)
        if reason is not error:
            try:
                raise reason from error
            finally:
                del reason  # else the error and this frame would keep each other alive
