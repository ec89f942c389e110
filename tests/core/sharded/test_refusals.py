"""What a sharded model's loop cannot be exact with raises by name, on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.support.sharded import Recipe
from tests.support.sharding import LIMIT, Training
from tests.support.workers import Workers
from torch_join import Join

# ------------------------------------------------------------ what is given


def ignored(_: int, api: str) -> None:
    net = Recipe().model()
    left_out = {*net.first.parameters()}
    model: Any = (
        fully_shard(net, ignored_params=left_out)
        if api == "fsdp2"
        else FullyShardedDataParallel(net, device_id=torch.device("cpu"), ignored_states=left_out, use_orig_params=True)
    )
    Join([model, torch.optim.SGD(model.parameters(), lr=0.1)])


def one_optimizer_over_both(rank: int, api: str) -> None:
    model, other = Training(rank, Recipe(api=api)).model, DistributedDataParallel(nn.Linear(2, 2).double())
    Join([model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)])


def without_the_model(rank: int, api: str) -> None:
    Join([Training(rank, Recipe(api=api)).optimizer])


def averaged(rank: int, api: str) -> None:
    training = Training(rank, Recipe(api=api))
    Join([training.model, training.optimizer, AveragedModel(training.model)])


def averaged_alone(rank: int, api: str) -> None:
    Join([AveragedModel(Training(rank, Recipe(api=api)).model)])


def detailed(rank: int, _: str) -> None:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        Join([Training(rank, Recipe(api="fsdp1")).model])
    finally:
        dist.set_debug_level(level)


@pytest.mark.parametrize(
    ("function", "match", "apis"),
    [
        (ignored, "belongs to nothing that FSDP shards", ("fsdp2", "fsdp1")),
        (one_optimizer_over_both, "steps parameters of a sharded model and 2 others", ("fsdp2", "fsdp1")),
        (without_the_model, "Give the model too, before it", ("fsdp2", "fsdp1")),
        (averaged, "AveragedModel .*update it after the loop", ("fsdp2",)),
        (averaged_alone, "AveragedModel .*update it after the loop", ("fsdp2",)),
        (detailed, "TORCH_DISTRIBUTED_DEBUG=DETAIL", ("fsdp1",)),
    ],
)
def test_what_is_given(workers: Workers, function: Callable[..., None], match: str, apis: tuple[str, ...]) -> None:
    for api in apis:
        for outcome in workers.outcomes(2, function, api):
            assert outcome.error.startswith("UnsupportedError"), outcome
            with pytest.raises(RuntimeError, match=match):
                raise RuntimeError(outcome.error)


# ------------------------------------------------------------ what is done in the tail


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Wrong(Training):
    """Does something before, or after, each of its steps."""

    def __init__(self, rank: int, recipe: Recipe, what: str) -> None:
        super().__init__(rank, recipe)
        self.what = what
        parameters = [p for p in self.model.parameters() if p.numel()]
        self.not_given = torch.optim.SGD(parameters, lr=0.01)

    @torch.no_grad()
    def update(self, epoch: int, step: int) -> None:
        held = [p for p in self.model.parameters() if p.grad is not None]
        for p in held:
            if self.what == "grad, locally":
                local(p.grad).mul_(0.5)
            elif self.what == "grad":
                p.grad.mul_(0.5)
            elif self.what == "grad.data":
                p.grad.data.mul_(0.5)
            elif self.what == "another grad":
                p.grad = p.grad * 0.5
        if self.what == "clip by value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        elif self.what == "another norm":
            nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.1, torch.tensor(2.0, dtype=torch.float64))
        elif self.what == "full_tensor":
            held[0].full_tensor()  # type: ignore[operator]
        elif self.what == "redistribute":
            held[0].redistribute(placements=[Replicate()])  # type: ignore[operator]
        self.optimizer.step()
        for p in held:
            if self.what == "weights, locally":
                local(p).clamp_(-0.1, 0.1)
            elif self.what == "weights":
                p.clamp_(-0.1, 0.1)
            elif self.what == "weights.data":
                p.data.mul_(0.9)
        if self.what == "an optimizer that was not given":
            self.not_given.step()


def do_wrong(rank: int, api: str, what: str, lengths: tuple[int, ...]) -> None:
    # Also where nothing comes after it: the tail is of the last step only.
    Wrong(rank, Recipe(lengths, api=api), what).run()


GRADIENT, PARAMETER = "gradient .* was changed by hand", "parameters were changed outside of the optimizer's step"
OTHERWISE = "Use torch.nn.utils.clip_grad_norm_"
DOINGS = {
    "grad, locally": GRADIENT,
    "grad": GRADIENT,
    "grad.data": GRADIENT,
    "another grad": GRADIENT,
    "clip by value": GRADIENT,
    "another norm": OTHERWISE,
    "full_tensor": "full_tensor",
    "redistribute": "redistribute",
    "weights, locally": PARAMETER,
    "weights": PARAMETER,
    "weights.data": PARAMETER,
    "an optimizer that was not given": PARAMETER,
}


@pytest.mark.parametrize("lengths", [(2, 5), (4, 3)], ids=["long", "last"])
@pytest.mark.parametrize("what", DOINGS)
def test_what_is_done_in_the_tail(workers: Workers, what: str, lengths: tuple[int, ...]) -> None:
    for api in ("fsdp2", "fsdp1"):
        if api == "fsdp1" and what in ("another norm", "full_tensor", "redistribute"):
            continue
        for outcome in workers.outcomes(2, do_wrong, api, what, lengths):
            with pytest.raises(RuntimeError, match=f"(?i)(?s){DOINGS[what]}"):
                raise RuntimeError(f"{api}: {outcome.error}")


# ------------------------------------------------------------ other steps


class ClosureTwice(Training):
    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)

    def step(self, epoch: int, step: int, batch: tuple[Tensor, Tensor]) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            (loss,) = self.recipe.losses(self.model, batch, self.rank)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]


def run_lbfgs(rank: int, api: str) -> None:
    ClosureTwice(rank, Recipe((2, 5), api=api)).run()


class _Reduced(torch.autograd.Function):
    """A collective of the user's, in backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        total = gradient.sum().reshape(1)
        dist.all_reduce(total)
        return gradient


class ReducesInBackward(Training):
    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.model.blocks[1].register_forward_hook(lambda *args: _Reduced.apply(args[-1]))


def reduce_in_backward(rank: int, api: str) -> None:
    ReducesInBackward(rank, Recipe((2, 5), api=api)).run()


def with_batch_norm(rank: int, _: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1)).double()
    model: Any = fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer], timeout=LIMIT) as join:
        for x in join.batches([torch.randn(4, 2).double()] * (2 + rank)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (run_lbfgs, "runs its closure more than once in a step"),
        (reduce_in_backward, "inside backward"),
        (with_batch_norm, "SyncBatchNorm"),
    ],
)
def test_other_steps(workers: Workers, function: Callable[..., None], match: str) -> None:
    for outcome in workers.outcomes(2, function, "fsdp2"):
        with pytest.raises(RuntimeError, match=match):
            raise RuntimeError(outcome.error)
