"""Saying which rank failed, and why, on all the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch_join import _compat
from torch_join._channel import Channel
from torch_join._errors import PeerFailedError, name_ranks


@contextmanager
def telling_failures(channel: Channel) -> Iterator[None]:
    """Tell the other ranks if the body raises, and say whose failure a broken collective comes from.

    Raises:
        PeerFailedError: In place of a communication error, if another rank has failed.

    """
    try:
        yield
    except PeerFailedError:
        raise
    except BaseException as error:
        if _compat.is_communication_error(error):
            missing = channel.roll_call()  # the rank that broke the collective may still be writing why
            if (failure := channel.failure()) is not None:
                raise failure from error
            if missing:
                raise PeerFailedError(
                    f"A collective failed on rank {channel.rank}, and {name_ranks(missing)} did not answer since:"
                    " killed, stopped, or at work elsewhere. Its own log says why."
                ) from error
        channel.fail(f"{type(error).__name__}: {error}")
        raise
