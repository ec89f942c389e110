"""The end of training, to which all ranks come, or hear who does not.

A rank that has run out of batches is not told of a stop that the others decide on in the loop's body. Where they end
their training, it begins the next loop, and would find them gone.
"""

from datetime import timedelta

import torch.distributed as dist

from torch_join._base.errors import DECIDE, ENDS, JoinTimeoutError, PeerFailedError, check_all_go_on
from torch_join._control.failures import telling_failures
from torch_join._control.rendezvous import open_channel


def say_farewell(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """End training; the ranks of `group` meet, in the place of a next `with`.

    Nobody fails by a rank whose process has ended, or that does not come in time: it may have work of its own left.

    Raises:
        JoinError: Another rank begins a `with`.
    """
    channel = open_channel(group, timeout)
    try:
        with telling_failures(channel):
            check_all_go_on(channel.gather(ENDS, of=list[str]), channel.global_ranks)
        channel.close(meets=True)
    except JoinTimeoutError:
        pass
    except PeerFailedError as error:
        if DECIDE not in error.reason:
            return
        raise
    finally:
        channel.close()
