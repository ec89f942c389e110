"""What a sharded model's loop cannot be exact with raises by name, on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.emulator import place
from tests.needs import needs
from tests.support.front_ends.sharded import PATIENCE, Training, shard, shard_fully
from tests.support.modes import Mode
from tests.support.sharded import Recipe
from tests.support.workers import Workers
from torch_join import Join, JoinableOptimizer, JoinableState

# ------------------------------------------------------------ what is given


def ignored(_: int, api: str) -> None:
    net = Recipe().build()
    left_out = {*net.first.parameters()}
    model: Any = (
        fully_shard(net, ignored_params=left_out)
        if api == "fsdp2"
        else FullyShardedDataParallel(net, device_id=place(), ignored_states=left_out, use_orig_params=True)
    )
    Join([model, torch.optim.SGD(model.parameters(), lr=0.1)])


def one_optimizer_over_both(rank: int, api: str) -> None:
    model, other = Training(rank, Recipe(api=api)).model, DistributedDataParallel(nn.Linear(2, 2).double())
    Join([model, other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)])


def without_the_model(rank: int, api: str) -> None:
    Join([Training(rank, Recipe(api=api)).optimizer])


def averaged(rank: int, api: str, *given: Any) -> None:
    recipe = Recipe(api=api)
    average = AveragedModel(recipe.build())  # torch copies no sharded model
    average.module = shard(average.module, recipe)
    Join([*given, average])


def averaged_beside(rank: int, api: str) -> None:
    training = Training(rank, Recipe(api=api))
    averaged(rank, api, training.model, training.optimizer)


def lbfgs(rank: int, api: str) -> None:
    model = Training(rank, Recipe(api=api)).model
    Join([model, torch.optim.LBFGS(model.parameters())])


def tensor_parallel(rank: int, _: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh(place().type, (dist.get_world_size(),))
    Join([parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})])


def over_some_ranks(rank: int, _: str) -> None:
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    Join([FullyShardedDataParallel(Recipe().build(), process_group=own, device_id=place())])


def in_torchs_own(rank: int, api: str) -> None:
    training = Training(rank, Recipe(api=api))
    things: list[Any] = [JoinableState(training.model), JoinableOptimizer(training.optimizer)]
    for thing in things[rank:]:  # another one on each rank: it raises before ranks meet
        TorchJoin([thing])


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
        (ignored, "is trained but not sharded by FSDP", ("fsdp1",)),
        pytest.param(
            *(ignored, "is trained but not sharded by FSDP", ("fsdp2",)),
            marks=needs("fully_shard's ignored_params"),
        ),
        (one_optimizer_over_both, "steps parameters of a sharded model and 2 others", ("fsdp2", "fsdp1")),
        (without_the_model, "Pass the model before the optimizer", ("fsdp2", "fsdp1")),
        (averaged, "AveragedModel .*update it after the loop", ("fsdp2", "fsdp1")),
        (averaged_beside, "AveragedModel .*update it after the loop", ("fsdp2", "fsdp1")),
        (lbfgs, "LBFGS cannot step sharded parameters", ("fsdp2", "fsdp1")),
        (in_torchs_own, "torch's own Join does not support that", ("fsdp2", "fsdp1")),
        (detailed, "TORCH_DISTRIBUTED_DEBUG=DETAIL", ("fsdp1",)),
        (tensor_parallel, "sharded only by tensor parallelism", ("fsdp2",)),
        (over_some_ranks, "sharded and averaged over 1 ranks", ("fsdp1",)),
    ],
)
def test_what_is_given(workers: Workers, function: Callable[..., None], match: str, apis: tuple[str, ...]) -> None:
    for api in apis:
        for outcome in workers.outcomes(2, function, api, **PATIENCE):
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
            elif self.what == "signs":
                p.grad.data.neg_()
            elif self.what == "another grad":
                p.grad = p.grad * 0.5
            elif self.what == "no grad" and p is held[1]:
                p.grad = None
        if self.what == "clip by value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.01)
        elif self.what == "a different norm":
            nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.1, torch.tensor(2.0, dtype=torch.float64))
        elif self.what == "full_tensor":
            held[0].full_tensor()  # type: ignore[operator]
        elif self.what == "full_tensor in a mode":
            with Mode():
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
    Wrong(rank, Recipe(lengths, api=api), what).run_epochs()


GRADIENT, PARAMETER = "gradient.* was modified by hand", "parameters were modified outside the optimizer step"
GATHERED = "needs the shards of finished ranks"
DOINGS = {
    "grad, locally": GRADIENT,
    "grad": GRADIENT,
    "grad.data": GRADIENT,
    "signs": GRADIENT,
    "another grad": GRADIENT,
    "no grad": GRADIENT,
    "clip by value": GRADIENT,
    "a different norm": GRADIENT,
    "full_tensor": GATHERED,
    "full_tensor in a mode": GATHERED,
    "redistribute": GATHERED,
    "weights, locally": PARAMETER,
    "weights": PARAMETER,
    "weights.data": PARAMETER,
    "an optimizer that was not given": PARAMETER,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(2, 5), (4, 3)], ids=["long", "last"])
@pytest.mark.parametrize("what", DOINGS)
def test_what_is_done_in_the_tail(workers: Workers, what: str, lengths: tuple[int, ...]) -> None:
    for api in ("fsdp2", "fsdp1"):
        # Joined ranks hear which gradients there are; those of the first generation have one for several parameters.
        if (
            what
            in {
                "fsdp1": ("a different norm", "full_tensor", "full_tensor in a mode", "redistribute"),
                "fsdp2": ("no grad",),
            }[api]
        ):
            continue
        for outcome in workers.outcomes(2, do_wrong, api, what, lengths, **PATIENCE):
            with pytest.raises(RuntimeError, match=f"(?i)(?s){DOINGS[what]}"):
                raise RuntimeError(f"{api}: {outcome.error}")


class ScalesSome(Training):
    """Scales what has six rows, of which the last of four ranks holds none."""

    @torch.no_grad()
    def update(self, epoch: int, step: int) -> None:
        for p in self.model.parameters():
            if p.shape[0] == 6:
                p.grad.mul_(0.5)
        super().update(epoch, step)


def scale_some(rank: int) -> None:
    training = ScalesSome(rank, Recipe((0, 0, 0, 5)))
    with training.joined() as join:
        for step, batch in enumerate(join.batches(training.recipe.batches(rank, 0))):
            training.step(0, step, batch)


def test_gradients_of_which_the_active_rank_holds_nothing(workers: Workers) -> None:
    for outcome in workers.outcomes(4, scale_some, **PATIENCE):
        with pytest.raises(RuntimeError, match=GRADIENT):
            raise RuntimeError(outcome.error)


class ClipsFirst(Training):
    """Clips its weights at the top of the one step that the other rank does not have, before its forward."""

    def step(self, epoch: int, step: int, batch: tuple[Tensor, Tensor]) -> None:
        if step == 3:
            for p in self.model.parameters():
                local(p.data).clamp_(-0.1, 0.1)
        super().step(epoch, step, batch)


def clip_first(rank: int, options: dict[str, Any]) -> None:
    ClipsFirst(rank, Recipe((4, 3), **options)).run_epochs()


@pytest.mark.parametrize("options", [{"loop": "plain"}, {"may_break": True}, {"weighting": "samples"}, {}])
def test_what_is_done_before_the_tail_is_noticed(workers: Workers, options: dict[str, Any]) -> None:
    for outcome in workers.outcomes(2, clip_first, options, **PATIENCE):
        with pytest.raises(RuntimeError, match=f"(?s){PARAMETER}"):
            raise RuntimeError(outcome.error)


# ------------------------------------------------------------ other steps


class _Twice(torch.optim.SGD):
    """Runs its closure twice, as those do that look ahead."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


class ClosureTwice(Training):
    def __init__(self, rank: int, recipe: Recipe) -> None:
        super().__init__(rank, recipe)
        self.optimizer = _Twice(self.model.parameters(), lr=0.1)

    def step(self, epoch: int, step: int, batch: tuple[Tensor, Tensor]) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            (loss,) = self.recipe.losses(self.model, batch, self.rank)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        self.optimizer.step(closure)


def run_closure_twice(rank: int, api: str) -> None:
    ClosureTwice(rank, Recipe((2, 5), api=api)).run_epochs()


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("function", "match"),
    [
        (run_closure_twice, "may run its closure more than once per step"),
    ],
)
def test_other_steps(workers: Workers, function: Callable[..., None], match: str, api: str) -> None:
    for outcome in workers.outcomes(2, function, api, **PATIENCE):
        with pytest.raises(RuntimeError, match=match):
            raise RuntimeError(outcome.error)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FullyShardedDataParallel(nn.Linear(4, 4), device_id=place()) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.layers[which](x)
        return out


def leave_a_share_out(rank: int) -> None:
    # Rank 0 has accumulated in one layer; then rank 1 runs the other, which syncs: FSDP1 does not come to the first.
    model = FullyShardedDataParallel(Either(), device_id=place())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        for layer in join.batches([1, 0] if rank == 0 else [1]):
            with model.no_sync():
                model(torch.ones(2, 4), layer).sum().backward()
        for layer in join.batches([1] * rank):
            model(torch.ones(2, 4), layer).sum().backward()
            optimizer.step()


def test_a_share_that_no_active_rank_syncs(workers: Workers) -> None:
    for outcome in workers.outcomes(2, leave_a_share_out, deadline=180.0, timeout=20.0):
        with pytest.raises(RuntimeError, match="would lose this rank's share"):
            raise RuntimeError(outcome.error)


def train_unsharded(rank: int) -> None:
    Training(rank, Recipe((4, 3), api="fsdp1", options={"strategy": "NO_SHARD"})).run_epochs()


def test_what_is_not_sharded_is_refused(workers: Workers) -> None:
    for outcome in workers.outcomes(2, train_unsharded, **PATIENCE):
        assert "with NO_SHARD, which PyTorch has deprecated. Use DistributedDataParallel" in outcome.error


def clear_what_is_whole(rank: int, set_to_none: bool) -> None:
    model = shard_fully(nn.Linear(4, 4), {})
    with Join([model]) as join:
        for x in join.batches([torch.ones(2, 4)] * (1 + 2 * rank)):
            model.zero_grad(set_to_none)  # of the whole parameters, which the backward before has left there
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            model(x).sum().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_unsynced_gradients_that_are_cleared(workers: Workers, set_to_none: bool) -> None:
    for outcome in workers.outcomes(2, clear_what_is_whole, set_to_none, **PATIENCE):
        with pytest.raises(RuntimeError, match=r"not yet synced gradient of .* was cleared or modified by hand"):
            raise RuntimeError(outcome.error)


def checkpoint_reentrantly(rank: int) -> None:
    Training(rank, Recipe((2, 5), api="fsdp1", model="checkpointed reentrant")).run_epochs()


def test_reentrant_checkpoints_of_the_first_generation(workers: Workers) -> None:
    for outcome in workers.outcomes(2, checkpoint_reentrantly, deadline=180.0, timeout=10.0):
        with pytest.raises(RuntimeError, match=r"modified by hand.*use_reentrant=False"):
            raise RuntimeError(outcome.error)
