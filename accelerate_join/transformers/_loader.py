"""A loader that has as many steps on each rank as the longest one has batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from accelerate.data_loader import DataLoaderShard
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from accelerate_join import _compat_transformers as _compat
from accelerate_join._loaders import length_of
from torch_join import JoinTypeError
from torch_join.integration import steps_of


class Said(NamedTuple):
    """What a rank says of a loader of its own, before anybody asks for a length.

    Attributes:
        length: Of its loader; `None` without one.
        examples: In its dataset; `None` if that has no length.
    """

    length: int | None
    examples: int | None


class EvenedLoader:
    """A loader of Accelerate's, and those of the other ranks.

    Its length, and what it knows of samples, is this rank's own until the ranks have told each other, which a run of
    `train` or `evaluate` begins with: asking for it is never something that ranks do together.

    Args:
        loader: This rank's own.
        find_reader: Returns what goes through it with the other ranks, a `Run`; `None` outside of one.
        trains: Whether what it yields is trained on.
        owns: Whether the dataset is this rank's own.
        rebalances: Whether ranks give batches to each other.

    Attributes:
        everyone: What each rank has said; empty until then.
        template: A batch without rows; `None` before this rank has one.
        end_of_dataloader: Whether no rank has another batch; Accelerate looks at it.
        remainder: That no sample is there twice; Accelerate looks at it.
    """

    remainder = 0

    def __init__(
        self,
        loader: DataLoaderShard,
        find_reader: Callable[[], Any],
        trains: bool,
        owns: bool,
        rebalances: bool = False,
    ) -> None:
        self.loader, self.trains, self.owns, self.rebalances = loader, trains, owns, rebalances
        self.everyone: Sequence[Said] = ()
        self.template: Any = None
        self.end_of_dataloader = False
        self._find_reader = find_reader
        self.resumes_stream = False

    @property
    def said(self) -> Said:
        """What this rank has to say."""
        return Said(length_of(self.loader), length_of(self.loader.dataset))

    @property
    def examples(self) -> int | None:
        """How many samples all ranks' datasets have; `None` if nobody knows."""
        numbers = [said.examples for said in self.everyone or [self.said]]
        if not self.owns:
            return numbers[0]
        return None if None in numbers else sum(number or 0 for number in numbers)

    def without_first(self, number: int) -> "EvenedLoader":
        """Return the same without its first batches, of which a rank may have fewer."""
        rest, run = copy(self), self._find_reader()
        rest.resumes_stream = self._has_no_length
        number = number if run is None else run.position.to_skip(number)
        rest.loader = _compat.skip_first_batches(self.loader, number)
        rest.everyone = ()
        return rest

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader the epoch; for Trainer, a stream that is resumed in a later pass is in its first one."""
        run = self._find_reader()
        self.loader.set_epoch(epoch if run is None or not self._has_no_length else run.position.pass_of(epoch))

    @property
    def _has_no_length(self) -> bool:
        return self.resumes_stream or any(said.length is None for said in self.everyone)

    def own_batches(self) -> Iterator[Any]:
        """Return this rank's batches, whatever others do, and a loop that goes on is left as it is."""
        alone = copy(self.loader)
        alone.rng_types = None  # which ranks exchange
        return iter(alone)

    def __len__(self) -> int:
        lengths = [said.length for said in self.everyone or [self.said]]
        if None in lengths:
            raise JoinTypeError("The dataloader of some rank has no length.")
        known = [length or 0 for length in lengths]
        return steps_of(known) if self.rebalances else max(known)

    def __iter__(self) -> Iterator[Any]:
        run = self._find_reader()
        batches: Iterator[Any] = iter(self.loader) if run is None else run.go_through(self)
        return batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of one that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)


def without_rows(batch: Any) -> Any:
    """Return a batch of the same kind with no rows, so that all that is counted in it is 0."""
    if isinstance(batch, Mapping):
        return type(batch)({key: without_rows(each) for key, each in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list) and not any(isinstance(each, (Tensor, Mapping)) for each in batch):
        return []  # one thing for each sample
    return recursively_apply(lambda tensor: tensor[:0].clone() if tensor.ndim else tensor, batch)
