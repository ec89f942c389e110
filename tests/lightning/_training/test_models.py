"""What DDP treats in its own way: its options, hooks, unused and sparse parameters, buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.front_ends.lightning import Fit, Module, assert_exact, assert_same_bits, fit
from tests.support.run import Batch, difference, reference
from tests.support.workers import Workers
from torch_join import JoinTypeError, UnsupportedError
from torch_join.integration import ModelShadow

TINY = {"bucket_cap_mb": 0.0001}
UNUSED = {"find_unused_parameters": True}
CASES = {
    "static-graph": Fit((3, 6), ddp={"static_graph": True}),
    "static-graph-empty": Fit((0, 4, 2), ddp={"static_graph": True, **TINY}, optimizer="sgd"),
    "static-graph-view": Fit((5, 2), ddp={"static_graph": True, "gradient_as_bucket_view": True}, clip=0.3),
    "bucket-view": Fit((6, 3), ddp={"gradient_as_bucket_view": True}, optimizer="zero", clip=0.3),
    "bucket-view-tiny": Fit((1, 4, 2), ddp={"gradient_as_bucket_view": True, **TINY}, accumulate=3),
    "tiny-buckets": Fit((0, 4, 2), ddp=TINY, iterable=True),
    "compiled": Fit((2, 5), compiled=True),
    "compiled-first": Fit((4, 0, 2), compiled=True, optimizer="sgd", accumulate=2),
    "hook": Fit((3, 6), hooked=True),
    "hook-first": Fit((6, 0, 2), hooked=True, optimizer="sgd", accumulate=2, iterable=True),
    "find-unused": Fit((3, 6), ddp={"find_unused_parameters": True}, optimizer="sgd"),
    "unused": Fit((3, 6), model="unused", ddp={"find_unused_parameters": True}, optimizer="sgd"),
    "unused-adamw": Fit((4, 0, 2), model="unused", ddp={"find_unused_parameters": True, **TINY}, optimizer="adamw"),
    "unused-static": Fit((4, 0, 2), model="unused", ddp={"static_graph": True}, optimizer="sgd"),
    "unused-in-tail": Fit((3, 6), model="sometimes", ddp={"find_unused_parameters": True}, optimizer="sgd"),
    "unused-zeros-first": Fit((5, 0, 2), model="sometimes", ddp=UNUSED, optimizer="adamw", clear="before, zeros"),
    "unused-windows": Fit((1, 6), model="sometimes", ddp=UNUSED, optimizer="sgd", accumulate=2),
    "unused-in-tail-view": Fit(
        (5, 2, 5),
        model="sometimes",
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True},
        optimizer="adamw",
    ),
    "sparse": Fit((3, 6), model="sparse", optimizer="plain"),
    "sparse-first": Fit((4, 0, 2), model="sparse", optimizer="plain", accumulate=2, iterable=True),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_a_single_process(workers: Workers, name: str) -> None:
    case = CASES[name]
    assert_exact(case, workers.run(case.world_size, fit, case))


@pytest.mark.parametrize(
    "case",
    [
        Fit((2, 6), model="norm"),
        Fit((6, 2), model="norm", optimizer="sgd"),
        Fit((0, 2, 5), model="norm", iterable=True),
        Fit(((2, 5), (5, 2), (0, 3)), model="norm"),
    ],
    ids=["rank-0-first", "rank-0-last", "rank-0-never", "in-turns"],
)
def test_buffers_follow_the_lowest_active_rank(workers: Workers, case: Fit) -> None:
    results = workers.run(case.world_size, fit, case)
    assert_exact(case, results)
    # Rank 0's are what a checkpoint holds.
    assert difference(results[0].buffers, list(reference(case).net.buffers())) < 1e-10


def test_buffers_of_an_accumulation_window(workers: Workers) -> None:
    # Within a window DDP leaves each rank its own buffers, so only the gradients can be compared.
    case = Fit((2, 5), model="norm", accumulate=2)
    results = workers.run(2, fit, case)
    assert_same_bits(results)
    assert difference(results[0].parameters, list(reference(case).net.parameters())) < 1e-10


def single_precision(case: Fit) -> Module:
    return Module(case).float()


class SinglePrecision(Fit):
    """The same batches in float32."""

    def batch(self, rank: int, epoch: int, index: int) -> Batch:
        x, y = super().batch(rank, epoch, index)
        return x.float(), y.float()


@pytest.mark.parametrize("lengths", [(2, 5), (5, 0, 2)])
def test_bf16_mixed_precision(workers: Workers, lengths: tuple[int, ...]) -> None:
    case, options = SinglePrecision(lengths, optimizer="sgd"), {"precision": "bf16-mixed"}
    results = workers.run(len(lengths), fit, case, single_precision, {}, options)
    assert_same_bits(results)
    expected = list(reference(Fit(lengths, optimizer="sgd")).net.parameters())
    # bfloat16 has 8 bits: the forward passes differ by some 1e-2 of the parameters' scale.
    assert difference(results[0].parameters, expected) < 2e-2


def test_an_unused_parameter_does_not_move(workers: Workers) -> None:
    case = CASES["unused"]
    before = copy.deepcopy(reference(case).net.extra.weight)
    for result in workers.run(2, fit, case):
        names = [name for name, _ in reference(case).net.named_parameters()]
        assert torch.equal(result.parameters[names.index("extra.weight")], before)


# ---------------------------------------------------------------- the shadow by itself


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.shared, x, use_reentrant=True)  # type: ignore[no-any-return]

        return run(run(x))


def shadow_a_reentrant_model(rank: int) -> str:
    ddp = DistributedDataParallel(Reentrant(), static_graph=True)
    shadow = ModelShadow(ddp)
    with shadow.step(shadow=False):
        ddp(torch.ones(2, 2, requires_grad=True)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"receives 2 gradients per backward under static_graph=True") as error:
        shadow.forward()
    return str(error.value)


def test_reentrant_checkpointing_in_a_static_graph_raises(workers: Workers) -> None:
    assert "use_reentrant=False" in workers.run(2, shadow_a_reentrant_model)[1]


def refuse(rank: int) -> str:
    mixed = DistributedDataParallel(nn.Linear(2, 2))
    mixed.mixed_precision = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError) as error:
        ModelShadow(mixed)
    with pytest.raises(JoinTypeError, match="Expected a DistributedDataParallel model, got Linear"):
        ModelShadow(nn.Linear(2, 2))  # type: ignore[arg-type]
    return str(error.value)


def test_what_cannot_be_shadowed_raises(workers: Workers) -> None:
    assert "mixed_precision" in workers.run(2, refuse)[0]
