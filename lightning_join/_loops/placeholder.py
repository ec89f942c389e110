"""What a joined rank's hooks get in place of a batch."""

from enum import Enum
from typing import Any


class State(Enum):
    """Where a rank is with its stand-in."""

    MISSING = "It has had no batch in this fit."
    KEPT = "It has had one."
    IN_USE = "It has joined, and its hooks get the stand-in until the epoch ends."


class Placeholder:
    """The last batch that this rank had in a fit, and what its `training_step` returned for it.

    A fit begins with `MISSING`. The first batch makes it `KEPT`, the first step without one `IN_USE`, the next epoch
    `KEPT` again. A rank that joins before its first batch is given another rank's, and goes from `MISSING` to `IN_USE`.

    Attributes:
        state: Where this rank is.
        batch: The batch. `None` while a newer one is trained on, so that only one is in memory.
        output: The output, if there was one.
    """

    def __init__(self) -> None:
        self.state = State.MISSING
        self.batch: Any = None
        self.output: dict[str, Any] | None = None

    def begin_epoch(self) -> None:
        """Begin an epoch, in which this rank has not joined yet."""
        if self.state is State.IN_USE:
            self.state = State.KEPT

    def let_go(self) -> None:
        """Make room for a newer batch of this rank's own."""
        self.keep(None, None)
        self.state = State.KEPT

    def keep(self, batch: Any, output: dict[str, Any] | None) -> None:
        """Keep a batch of this rank's own."""
        self.batch, self.output = batch, output

    def use(self) -> bool:
        """Begin, or go on, to use it, if there is one; return whether this rank has only now joined."""
        joins = self.state is not State.IN_USE
        if self.state is State.KEPT:
            self.state = State.IN_USE
        return joins

    def use_shared(self, batch: Any) -> None:
        """Use the batch of another rank."""
        self.batch = batch
        self.state = State.IN_USE
