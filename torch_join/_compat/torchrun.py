"""Reports to torchrun that a rank ends because another one has failed."""

import json
import os
import time
from contextlib import suppress

_LATER = 60  # seconds; torchrun takes up to 30 to end the other ranks


def note_victim(text: str) -> None:
    """Tell torchrun, which reports the earliest failure as the root cause, that this rank failed later.

    Without this file, a failure counts from the time when torchrun sees the rank end. torch's `record` writes one, too.
    """
    with suppress(OSError, KeyError):
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        more = {"timestamp": str(int(time.time()) + _LATER), "py_callstack": text}
        whole = f"{path}.{os.getpid()}"  # torchrun raises if it reads a partial file
        try:
            with open(whole, "w") as file:
                json.dump({"message": {"message": text, "extraInfo": more}}, file)
            os.link(whole, path)  # unless there is one
        finally:
            os.unlink(whole)


def forget_victim() -> None:
    """Remove the report of `note_victim`, since this rank continues."""
    with suppress(OSError, KeyError):
        os.unlink(os.environ["TORCHELASTIC_ERROR_FILE"])
