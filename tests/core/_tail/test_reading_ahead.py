"""Loaders that must not be read ahead, and those that must not refill their memory where they are."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.workers import Workers
from torch_join import Join, JoinValueError, UnpaddedDistributedSampler, UnsupportedError
from torch_join.integration import Reader, RefillGuard, dealer_of, refuse_position


class Loader:
    """Has a length; its batches come from `fill`, which gets the batch's number."""

    def __init__(self, fill: Callable[[int], Any], length: int = 6) -> None:
        self.fill = fill
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.fill(number) for number in range(self.length))


class Image(Tensor):
    """As torchvision's."""


class Opaque:
    """Says nothing of what it holds."""


class Made(Mapping[str, Any]):
    """A batch that makes what it holds when it is asked for it."""

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[str]:
        return iter(["tensor", "array", "text", "noise", "object", "objects"])

    def __getitem__(self, name: str) -> Any:
        return {
            "tensor": lambda: self.mean + 1,
            "array": lambda: self.mean.numpy() + 1,
            "text": lambda: f"batch {self.mean}",
            "noise": lambda: self.mean + torch.rand(2),
            "object": Opaque,
            "objects": lambda: numpy.array([Opaque(), 1]),
        }[name]()


def refilling(kind: str) -> Callable[[int], Any]:
    buffers = [torch.zeros(2) for _ in range(2)]
    array, several = numpy.zeros(2), torch.zeros(3, 2)
    growing: dict[int, Tensor] = {}
    same: dict[str, Any] = {"mask": torch.ones(2)}
    strided, raw = torch.zeros(4)[::3], torch.zeros(17, dtype=torch.int8)
    names = numpy.empty(3, dtype=object)
    holder = Opaque()
    holder.names = names  # type: ignore[attr-defined]
    made, image = Made(torch.zeros(2)), torch.zeros(2).as_subclass(Image)

    def again(number: int) -> Any:
        same["x"] = torch.full((2,), number)
        return same

    kinds: dict[str, Callable[[int], Any]] = {
        "tensor": lambda n: buffers[0].fill_(n),
        "two in turns": lambda n: buffers[n % 2].fill_(n),
        "data": lambda n: (buffers[0], buffers[0].data.fill_(n))[0],
        "a new tensor of an array": lambda n: (array.fill(n), {"x": [torch.from_numpy(array)]})[1],
        "array": lambda n: (array.fill(n), array)[1],
        "a part": lambda n: (torch.ones(2), several[:1].fill_(n)),
        "the dictionary": again,
        "a subclass": lambda n: image.fill_(n),
        "a batch of its own kind": lambda n: (made.mean.fill_(n), made)[1],
        "an object in the dictionary": lambda n: (same.update(x=Opaque()), same)[1],
        "late": lambda n: torch.ones(2) * n if n < 1 else growing.setdefault(n // 4, torch.zeros(2)).fill_(n),
        "strided": lambda n: strided.fill_(n),
        "unaligned": lambda n: raw[1:9].fill_(n),
        "odd bytes": lambda n: raw[:15].fill_(n),
        "objects": lambda n: (names.fill(f"batch {n}"), names)[1],
        "objects in an object": lambda n: (names.fill(f"batch {n}"), holder)[1],
    }
    return kinds[kind]


SHORT = (
    *("tensor", "data", "a new tensor of an array", "array", "a part", "the dictionary", "a batch of its own kind"),
    *("an object in the dictionary", "a subclass", "unaligned", "odd bytes"),
)


def read_ahead(loader: Any, ahead: int = 2) -> Iterator[Any]:
    """Read two batches ahead, as with `rebalance=True`, or one, as in Lightning."""
    guard, batches, waiting = RefillGuard(loader, gives=ahead > 1), iter(loader), deque[Any]()
    while True:
        with suppress(StopIteration):
            while len(waiting) <= ahead:
                waiting.append(guard.read([*waiting], partial(next, batches)))
        if not waiting:
            return
        yield waiting.popleft()


@pytest.mark.parametrize(
    ("kind", "ahead", "length"),
    [
        *((kind, 2, 6) for kind in (*SHORT, "two in turns", "late", "strided", "objects", "objects in an object")),
        *((kind, 1, 6) for kind in (*SHORT, "late", "strided")),
        *((kind, 2, 2) for kind in SHORT),
    ],
)
def test_a_refilled_batch_is_noticed(kind: str, ahead: int, length: int) -> None:
    why = "one is read ahead" if ahead == 1 else "rebalance=True"
    with pytest.raises(JoinValueError, match=rf"reuses the memory of one batch.*{why}"):
        list(read_ahead(Loader(refilling(kind), length), ahead))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and quantized tensors
def test_what_is_not_refilled_may_share_memory() -> None:
    constant, whole = torch.tensor([1.0, torch.nan]), torch.arange(40.0)
    loaders: dict[str, Any] = {
        "constant": Loader(lambda _: constant),
        "mask": Loader(lambda n: {"x": torch.full((2,), n), "mask": constant}),
        "views": Loader(lambda n: whole[4 * n : 4 * n + 6]),
        "array": Loader(lambda n: (torch.from_numpy(whole.numpy())[n:], numpy.ones(3), "text", n)),
        "sparse": Loader(lambda n: torch.eye(2).to_sparse()),
        "made when asked for": Loader(lambda n: Made(torch.full((2,), float(n)))),
        "nested": Loader(lambda n: torch.nested.nested_tensor([torch.ones(2), torch.ones(n + 1)])),
        "jagged": Loader(lambda n: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        "quantized": Loader(lambda n: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        "meta": Loader(lambda n: torch.ones(2, device="meta")),
        "objects": Loader(lambda n: numpy.array(["a", Opaque()], dtype=object)),
        "masked": Loader(lambda n: numpy.ma.array([1, 2], mask=[0, 1])),
        "packed": Loader(lambda n: pack_sequence([torch.ones(3), torch.ones(2)])),
        "conjugated": Loader(lambda n: torch.ones(3, dtype=torch.complex64).conj()),
        "expanded": Loader(lambda n: torch.ones(1).expand(3)),
        "wrapped": Loader(lambda n: TwoTensor(torch.ones(2), torch.ones(2))),
        "strings": Loader(lambda n: ["a", "b"]),
        "list": [constant] * 6,
        "empty": Loader(lambda n: torch.empty(0, 3)[:, ::2]),
    }
    for name, loader in loaders.items():
        assert len(list(read_ahead(loader))) == 6, name
    assert len(list(read_ahead(Loader(refilling("two in turns")), ahead=1))) == 6


def test_a_batch_may_be_changed_by_the_loop() -> None:
    """A list whose batches the loop normalizes in place, or a constant one."""
    constant = torch.ones(2)
    for batch in read_ahead(Loader(lambda _: constant)):
        batch.mul_(2)
    assert constant.eq(2**6).all()


class Curriculum:
    """Gives out, as a batch, how often the model has been trained."""

    def __init__(self, model: torch.nn.Linear, length: int) -> None:
        self.model, self.length = model, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.length):
            yield self.model.bias.detach().clone()


def train(rank: int, lengths: tuple[int, ...], kind: str, may_break: bool = False) -> list[float]:
    """Train on batches of one number, which is that of the step: it comes in one tensor, or is read off the model."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)
    ddp, length, buffer = DistributedDataParallel(model), lengths[rank], torch.zeros(1, 1)
    loaders: dict[str, Any] = {
        "refilled": Loader(lambda number: buffer.fill_(number), length),
        "curriculum": Curriculum(model, length),
        "certain": DataLoader([0] * length, batch_size=1, collate_fn=lambda _: model.bias.detach().clone()),  # type: ignore[arg-type]
    }
    seen = []
    with Join([ddp], may_break=may_break) as join:
        for batch in join.batches(loaders[kind]):
            seen.append(float(batch))
            ddp(batch).sum().backward()
            model.bias.data += 1
    return seen


@pytest.mark.parametrize("may_break", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (0, 5)])
def test_no_rank_trains_on_a_refilled_batch(workers: Workers, lengths: tuple[int, ...], may_break: bool) -> None:
    assert workers.run(2, train, lengths, "refilled", may_break) == [list(map(float, range(n))) for n in lengths]


@pytest.mark.parametrize("kind", ["curriculum", "certain"])
@pytest.mark.parametrize("lengths", [(5, 5), (2, 5)])
def test_a_batch_may_depend_on_the_step_before(workers: Workers, lengths: tuple[int, ...], kind: str) -> None:
    assert workers.run(2, train, lengths, kind) == [list(map(float, range(n))) for n in lengths]


# ---------------------------------------------------------------- loaders with a position


class Counting:
    """Knows how many batches it has given out, as a loader with `state_dict` does."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < self.length:
            self.given += 1
            yield torch.full((1, 1), float(self.given), dtype=torch.float64)
        self.given = 0


class CountingSampler(SequentialSampler):
    given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self)):
            self.given = index + 1
            yield index


class Bar:
    """Like a progress bar."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def save_within(rank: int, lengths: tuple[int, ...], kind: str) -> list[int]:
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1).double())
    data = torch.ones(lengths[rank], 1, dtype=torch.float64)
    sampler = CountingSampler(data)
    counting = Counting(lengths[rank])
    loaders: dict[str, tuple[Any, Callable[[], int]]] = {
        "own": (counting, lambda: counting.state_dict()["given"]),
        "bar": (Bar(counting), lambda: counting.state_dict()["given"]),
        "sampler": (DataLoader(data, 1, sampler=sampler), lambda: sampler.given),  # type: ignore[arg-type]
    }
    if kind == "stateful":
        stateful = StatefulDataLoader(data, 1)  # type: ignore[arg-type]
        loaders[kind] = stateful, lambda: int(stateful.state_dict()["_num_yielded"])
    loader, given = loaders[kind]
    found = []
    with Join([ddp]) as join:
        for batch in join.batches(loader):
            ddp(batch).sum().backward()
            found.append(given())
    return found


@pytest.mark.parametrize("kind", ["own", "bar", "sampler", "stateful"])
@pytest.mark.parametrize("lengths", [(4, 4), (1, 5)])
def test_the_position_is_that_of_the_batch_in_the_loop(workers: Workers, kind: str, lengths: tuple[int, ...]) -> None:
    assert workers.run(2, save_within, lengths, kind) == [list(range(1, n + 1)) for n in lengths]


def test_a_module_in_a_loader_is_no_position() -> None:
    loader = Bar(torch.ones(3, 1))
    loader.transform = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    refuse_position(loader)
    with pytest.raises(UnsupportedError, match=r"has a state_dict\(\)"):
        refuse_position(Bar(Bar(Counting(3))))


def test_lengths_that_are_certain() -> None:
    data, even = torch.ones(6, 1), UnpaddedDistributedSampler(range(6), 2, 0)
    loaders: dict[Any, int | None] = {
        (1, 2, 3): 3,
        DataLoader(data, 2): 3,  # type: ignore[arg-type]
        DataLoader(data, 2, shuffle=True): 3,  # type: ignore[arg-type]
        DataLoader(data, sampler=even): 3,  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=BatchSampler(even, 2, drop_last=True)): 1,  # type: ignore[arg-type]
        DataLoader(data, sampler=CountingSampler(data)): None,  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=[[0], [1]]): None,  # type: ignore[arg-type]
        DataLoader(Numbers(), 2): None,
        DataLoader(Numbers(), None): None,
        Loader(lambda number: number): None,
        Backwards(data, 2): None,
        Named(data, 2): 3,
        DataLoader(data, batch_sampler=BatchSampler(BatchSampler(CountingSampler(data), 1, False), 1, False)): None,  # type: ignore[arg-type]
        range(3): None,
    }
    for loader, length in loaders.items():
        assert Reader(loader).certain_length() == length, loader
    assert Reader([1, 2]).certain_length() == 2
    for batches in (None, BatchSampler(even, 2, drop_last=False)):  # what is left of an epoch of other ranks
        dealer = dealer_of(
            DataLoader(data, sampler=even) if batches is None else DataLoader(data, batch_sampler=batches)
        )  # type: ignore[arg-type]
        rest: Any = dealer.of([5, 1, 3])
        left = DataLoader(data, sampler=rest) if batches is None else DataLoader(data, batch_sampler=rest)  # type: ignore[arg-type]
        assert Reader(left).certain_length() == (3 if batches is None else 2)


class Backwards(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return reversed([1, 2])


class Named(DataLoader[Any]):
    def __init__(self, data: Any, size: int) -> None:
        super().__init__(data, size)
        self.name = "named"


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 4


def rings(fresh: int, buffers: int, count: int) -> Iterator[torch.Tensor]:
    """Batches of their own, and then such as are made in the memory of earlier ones."""
    ring = [torch.empty(8) for _ in range(buffers)]
    for index in range(count):
        yield torch.full((8,), index) if index < fresh else ring[index % buffers].fill_(index)


def test_a_loader_that_begins_to_refill_late_is_noticed_where_one_is_read_ahead() -> None:
    with pytest.raises(JoinValueError, match="reuses the memory"):
        list(read_ahead(rings(8, 1, 20), ahead=1))


def fetch_between(rank: int, lengths: tuple[int, ...]) -> None:
    """Accumulate over two batches, and ask for the next one while the device is busy with a forward."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model, optimizer]) as join:
        batches = iter(join.batches([torch.full((2, 3), 1.0 + rank + step) for step in range(lengths[rank])]))
        x = next(batches, None)
        while x is not None:
            for part in range(2):
                model.require_backward_grad_sync = part == 1
                assert x is not None
                loss = model(x).square().mean()
                x = next(batches, None)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("lengths", [(4, 8), (8, 2)])
def test_a_fetch_between_forward_and_backward_is_named(workers: Workers, lengths: tuple[int, ...]) -> None:
    for outcome in workers.outcomes(2, fetch_between, lengths, timeout=3.0):
        assert "ran out of batches between a forward and its backward" in outcome.error
