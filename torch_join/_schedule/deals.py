"""Deals out the rest of an epoch, which a job with another number of ranks has started, to the ranks of this job.

A place in such an epoch is a list of deals, one for each job that has run a part of it. A deal has the job's number of
ranks, the batch size, and for each rank the number of batches of its share that any rank has trained on. The next deal
distributes the remaining indices, in their original order: index i goes to rank `i % world`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from torch_join._base.errors import JoinValueError, UnsupportedError
from torch_join._schedule.drawing import drawn_as, draws_order, own_drawing

# For one job: its number of ranks (`world`), each rank's batches trained on (`taken`), the indices per batch (`batch`).
Deal = dict[str, Any]
# Classes in these modules give index i of one order, the same on all ranks, to rank `i % num_replicas`.
_IN_TURN = ("torch.utils.data.distributed", "torch_join._base.sampler", "lightning.", "pytorch_lightning.")
_log = getLogger("torch_join")
_INSTEAD = "Resume with the number of ranks that wrote the state, or from a state written at an epoch's end."


class Dealer:
    """Deals out one order of indices, or of whole batches, to all ranks.

    Args:
        sampler: A sampler with `rank` and `num_replicas`.
        batches: The batch sampler around it; `None` if `sampler` yields batches, or the loader single samples.

    Attributes:
        batch: The number of the sampler's indices in a batch.
    """

    def __init__(self, sampler: Any, batches: BatchSampler | None = None) -> None:
        self._sampler, self._batches = sampler, batches
        self.batch = 1 if batches is None else batches.batch_size
        self.rank, self.world = int(sampler.rank), int(sampler.num_replicas)

    def of(self, indices: Sequence[Any]) -> Any:
        """Return a sampler of these indices, to replace the loader's sampler."""
        own, rest = self._batches, Rest(indices)
        return rest if own is None else BatchSampler(rest, own.batch_size, own.drop_last)

    def order(self, world: int, drawn: Callable[[], Any]) -> tuple[Sequence[Any], Tensor, Tensor]:
        """Return the items that `world` ranks get, in order, with each item's rank and its index on that rank.

        Args:
            world: The number of ranks.
            drawn: Returns a context in which the sampler draws the epoch's order again.

        Raises:
            UnsupportedError: The sampler cannot show which items another rank gets.
        """
        if isinstance(self._sampler, DistributedSampler) and _deals_in_turn(type(self._sampler)):
            with drawn():
                order = [*self._as(0, 1)]
            if self._sampler.drop_last:
                order = order[: len(order) // world * world]
            return in_turn(order, world)
        shares, now = ([self._share(rank, of, drawn) for rank in range(of)] for of in (world, self.world))
        if _counted(shares) != _counted(now) or max(_counted(shares).values(), default=1) > 1:
            raise UnsupportedError(
                f"{world} ranks started the epoch, and the remaining samples are unknown: a"
                f" {type(self._sampler).__name__} whose `rank` and `num_replicas` are set to those of other ranks"
                f" does not yield each sample on exactly one of {world} (or {self.world}) ranks. Read only these two"
                f" attributes in `__iter__`, not values computed from them earlier. {_INSTEAD}"
            )
        found = [(place, rank) for rank, share in enumerate(shares) for place in range(len(share))]
        found.sort()
        places, ranks = torch.tensor(found, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return [shares[rank][place] for place, rank in found], ranks, places

    def _as(self, rank: int, world: int) -> Any:
        """Return a copy of the sampler for another rank and number of ranks."""
        other = copy(self._sampler)
        other.rank, other.num_replicas = rank, world
        if callable(unpad := getattr(other, "unpad", None)):
            unpad()
        elif isinstance(other, DistributedSampler):
            samples = len(other.dataset)  # type: ignore[arg-type]
            other.num_samples = samples // world if other.drop_last else -(-samples // world)
            other.total_size = other.num_samples * world
        return other

    def _share(self, rank: int, world: int, drawn: Callable[[], Any]) -> list[Any]:
        with drawn():
            return [*self._as(rank, world)]


def in_turn(order: Sequence[Any], world: int) -> tuple[Sequence[Any], Tensor, Tensor]:
    """Return an order dealt to `world` ranks in turn, in the form that `Dealer.order` returns."""
    numbers = torch.arange(len(order))
    return order, numbers % world, numbers // world


def _counted(shares: Sequence[Sequence[Any]]) -> Counter[Any]:
    return Counter(tuple(each) if isinstance(each, list) else each for share in shares for each in share)


def _deals_in_turn(kind: type) -> bool:
    iterating = next(base for base in kind.__mro__ if "__iter__" in vars(base))
    return iterating.__module__.startswith(_IN_TURN)


class Rest(list[Any]):
    """A sampler of the remaining indices of this rank."""


def dealer_of(loader: Any) -> Dealer | None:
    """Return the dealer of a loader's samples; `None` if no sampler that tells its rank distributes them."""
    if not isinstance(loader, DataLoader):
        return None
    own: Any = type(loader)
    if own.__iter__ is not DataLoader.__iter__ and not own.__module__.startswith("torchdata."):
        return None
    batches: Any = loader.batch_sampler
    sampler = loader.sampler
    if batches is None or _has_rank(batches):
        deals_out = sampler if batches is None else batches
        return Dealer(deals_out) if _has_rank(deals_out) else None
    is_plain = isinstance(batches, BatchSampler) and type(batches).__module__.startswith(("torch.", "torchdata."))
    return Dealer(batches.sampler, batches) if is_plain and _has_rank(batches.sampler) else None


def _has_rank(sampler: Any) -> bool:
    return all(isinstance(getattr(sampler, name, None), int) for name in ("rank", "num_replicas"))


def left_of(
    loader: Any, dealer: Dealer | None, deals: Sequence[Deal], states: dict[str, Any], world: int, is_new: bool
) -> list[Any]:
    """Return this rank's remaining indices, or batches, of an epoch.

    Args:
        loader: The loader, with all sources of the order.
        dealer: The current dealer.
        deals: The deals of the earlier jobs.
        states: The states from which the order was drawn: see `drawing`.
        world: The number of ranks.
        is_new: Whether that number has changed; if so, this logs a warning.

    Raises:
        JoinValueError: The loader's sampler deals out to another number of ranks.
        UnsupportedError: No sampler distributes the loader's samples to the ranks, or its order cannot be reproduced.
    """
    name = type(loader).__name__
    if dealer is None:
        raise UnsupportedError(
            f"{deals[0]['world']} ranks started the epoch, but the samples of this {name} are not distributed by an"
            " object with `rank` and `num_replicas`, such as torch's DistributedSampler, so the remaining samples of"
            f" other ranks are unknown. {_INSTEAD}"
        )
    if dealer.world != world:
        raise JoinValueError(
            f"The sampler of the {name} distributes samples to {dealer.world} ranks, but {world} ranks continue the"
            f" epoch. Create the sampler for {world} ranks."
        )
    # Leave out generators of samplers with a `set_epoch`: the epoch seeds them.
    seeded = {f"{part}.generator" for part in own_drawing(loader)["told"]}
    then, now = (
        {part for part in own if draws_order(part)} - seeded for own in (states["own"], own_drawing(loader)["own"])
    )
    if then != now:
        raise UnsupportedError(
            f"{deals[0]['world']} ranks started the epoch in an order drawn from"
            f" {', '.join(then) or 'the generator of torch itself'}, but this {name} draws it from"
            f" {', '.join(now) or 'the generator of torch itself'}, so the remaining samples are unknown. Draw the"
            " order from a seed and the epoch (torch's DistributedSampler, Accelerate's use_seedable_sampler=True)."
            f" {_INSTEAD}"
        )

    @contextmanager
    def drawn() -> Iterator[None]:
        with drawn_as(loader, states):
            before = torch.get_rng_state(), random.getstate()
            if loader.generator is not None and not states["reuses"]:  # an iterator draws from it first
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            yield
            if not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate():
                raise UnsupportedError(
                    f"The order of the {name} is drawn from the global generator of torch or Python, which may differ"
                    " between ranks, so the remaining samples of other ranks are unknown. Give the sampler its own"
                    f" generator. {_INSTEAD}"
                )

    order, ranks, places = dealer.order(deals[0]["world"], drawn)
    left = torch.arange(len(order))
    for number, deal in enumerate(deals):
        if number:
            _, ranks, places = in_turn(left, deal["world"])  # type: ignore[arg-type]
        rest = places >= torch.tensor(deal["taken"], dtype=torch.int64)[ranks] * deal["batch"]
        left, places, ranks = left[rest], places[rest], ranks[rest]
    if is_new and dealer.rank == 0:
        _log.warning(
            "An epoch started by %d ranks continues with %d: the remaining %d %s are redistributed. The number of steps"
            " changes, so a schedule made for the old number may not fit, and weighting='world' now divides by %d.",
            deals[-1]["world"],
            world,
            len(left),
            "batches" if len(order) and isinstance(order[0], list) else "samples",
            world,
        )
    return [order[index] for index in left[dealer.rank :: world].tolist()]


def redealt_loader(loader: Any, deals: Sequence[Deal], states: dict[str, Any], world: int, is_new: bool) -> Any:
    """Return a loader of this rank's rest of an epoch; see `left_of`."""
    dealer = dealer_of(loader)
    left = left_of(loader, dealer, deals, states, world, is_new)
    assert dealer is not None
    rest = copy(loader)
    where = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # `DataLoader.__setattr__` refuses these.
    vars(rest).update({where: dealer.of(left), "generator": None, "_iterator": None})
    return rest
