"""What is handed over of optimizers that are more than torch's, what goes with it, and what stays on each rank."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.support.small import Places, steps_of
from tests.support.workers import Workers
from torch_join import Join


class Around(Optimizer):
    """An optimizer around one, as timm's Lookahead is: without `Optimizer.__init__`, with the other's groups."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self._base = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self._base.step(closure)

    def state_dict(self) -> Any:
        return self._base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._base.load_state_dict(state)


class Lookahead(Around):
    """With slow weights of its own, saved under the parameters' places, and a counter in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self._base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", torch.zeros_like(p))
                if self.count % 2 == 0:
                    with torch.no_grad():
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)

    def state_dict(self) -> Any:
        slow = [self.state.get(p, {}).get("slow") for group in self.param_groups for p in group["params"]]
        return {"base": self._base.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self._base.load_state_dict(state["base"])
        self.count = state["count"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, slow in zip(parameters, state["slow"], strict=True):
            if slow is not None:
                self.state[p] = {"slow": slow.clone()}


class ByParameter(Lookahead):
    """The same, saved under the parameters themselves, as pytorch_optimizer's once did."""

    def state_dict(self) -> Any:
        return {"base": self._base.state_dict(), "slow": dict(self.state), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self._base.load_state_dict(state["base"])
        self.state.update({p: dict(entry) for p, entry in state["slow"].items()})
        self.count = state["count"]


class Stateful(SGD):
    """Keeps all of its state in one entry that is no parameter's, by parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        sums = self.state["sums"]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums[p] = sums.get(p, 0.0) * 0.5 + p.grad
                    p.sub_(group["lr"] * sums[p])


class Sharpness(Around):
    """SAM: two passes in each step."""

    def climb(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    self.state[p]["old"] = p.clone()
                    p.add_(p.grad, alpha=0.1)
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["old"])
        self._base.step()


def hooked(parameters: Any) -> Optimizer:
    """SGD with a rate that falls by a counter, which hooks put into the state dict."""
    optimizer: Any = SGD(parameters, 0.1, 0.9)
    optimizer.count = 0

    def saved(_: Any, state: Any) -> Any:
        return {**state, "count": optimizer.count}

    def loaded(_: Any, state: Any) -> Any:
        optimizer.count = state.pop("count")

    def counted(*_: Any) -> None:
        optimizer.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / optimizer.count

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loaded)
    optimizer.register_step_pre_hook(counted)
    return optimizer  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "around": lambda p: Around(SGD(p, 0.1, 0.9)),
    "around twice": lambda p: Around(Around(Adam(p, 0.1))),
    "lookahead": lambda p: Lookahead(SGD(p, 0.1, 0.9)),
    "lookahead by parameter": lambda p: ByParameter(Adam(p, 0.1, amsgrad=True)),
    "one entry": lambda p: Stateful(p, 0.1),
    "sharpness": lambda p: Sharpness(SGD(p, 0.1, 0.9)),
    "hooks": hooked,
    "two groups": lambda p: Lookahead(Adam([{"params": [*p][:1], "lr": 0.2}, {"params": [*p][1:]}], 0.1)),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([*p][:1], 0.1)
EPOCHS = {2: ((1, 3), (2, 2), (0, 4), (3, 3)), 3: ((2, 0, 4), (2, 2, 2), (1, 3, 3), (1, 1, 1))}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)).double()


def inputs(rank: int, epoch: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * epoch + step)
    return torch.randn(4, 2, generator=generator, dtype=torch.float64)


def one_step(optimizer: Any, backward: Callable[[], None]) -> None:
    optimizer.zero_grad()
    backward()
    if isinstance(optimizer, Sharpness):
        optimizer.climb()
        backward()
    optimizer.step()


def train(rank: int, kind: str, epochs: Any) -> tuple[list[Any], bool]:
    ddp = DistributedDataParallel(build())
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    scheduler = StepLR(optimizer, 2, 0.8)
    identities = [id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)]
    with Join([scheduler, ddp, optimizer]) as join:
        for epoch, lengths in enumerate(epochs):
            for step in join.batches(range(lengths[rank])):
                one_step(optimizer, lambda e=epoch, s=step: ddp(inputs(rank, e, s)).square().mean().backward())  # type: ignore[misc]
                scheduler.step()
    same = identities == [id(optimizer.param_groups), id(optimizer.state), *map(id, optimizer.param_groups)]
    return [p.tolist() for p in ddp.parameters()], same


def alone(kind: str, epochs: Any) -> list[Any]:
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = StepLR(optimizer, 2, 0.8)
    for epoch, lengths in enumerate(epochs):
        for places in steps_of(lengths):

            def backward(epoch: int = epoch, places: Places = places) -> None:
                losses = [model(inputs(rank, epoch, step)).square().mean() for rank, step in places]
                (torch.stack(losses).sum() / len(epochs[0])).backward()

            one_step(optimizer, backward)
            scheduler.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_is_more_than_torchs(workers: Workers, kind: str, world_size: int) -> None:
    epochs = EPOCHS[world_size]
    expected = alone(kind, epochs)
    found = workers.run(world_size, train, kind, epochs)
    for parameters, same in found:
        assert parameters == found[0][0]
        assert same  # schedulers and wrappers hold on to them
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-9, atol=1e-9)


def train_outside(rank: int, kind: str) -> Any:
    """Parameters that no given model holds."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    masters = [p.detach().double() for p in model.parameters()]
    temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer: Any = Adam(
        [*masters, temperature] if kind == "plain" else [{"params": masters}, {"params": [temperature]}]
    )
    optimizer = Lookahead(optimizer) if kind == "wrapped" else optimizer
    with Join([optimizer, ddp]) as join:
        for epoch, lengths in enumerate(((1, 3), (2, 2), (2, 0))):
            for step in join.batches(range(lengths[rank])):
                ddp.zero_grad()
                x = inputs(rank, epoch, step).float()
                (ddp(x).square().mean() * temperature.detach().float()).backward()
                for master, p in zip(masters, model.parameters(), strict=True):
                    master.grad = p.grad.double()  # type: ignore[union-attr]
                temperature.grad = masters[0].grad.sum().reshape(1)  # type: ignore[union-attr]
                optimizer.step()
                with torch.no_grad():
                    for master, p in zip(masters, model.parameters(), strict=True):
                        p.copy_(master)
            if epoch == 0 and rank == 1:
                temperature.requires_grad_(False)
    return [p.tolist() for p in (*model.parameters(), *masters, temperature)]


@pytest.mark.parametrize("kind", ["plain", "two groups", "wrapped"])
def test_parameters_that_no_model_holds(workers: Workers, kind: str) -> None:
    first, second = workers.run(2, train_outside, kind)
    assert first == second


class Experts(nn.Module):
    def __init__(self, rank: int, local: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(2, 2)
        torch.manual_seed(rank if local else 0)
        self.expert = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.expert(self.body(x).tanh())
        return result


def train_ignored(rank: int, local: bool, options: Any, wrapped: bool) -> Any:
    model = Experts(rank, local).double()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])
    ddp = DistributedDataParallel(model)
    sgd = SGD(model.parameters(), 0.1, 0.9)
    optimizer = Lookahead(sgd) if wrapped else sgd
    parameters = [*model.expert.parameters()]
    seen: Any = None
    with Join([ddp, optimizer], **options) as join:
        for epoch, lengths in enumerate(((1, 3), (2, 2), (4, 2))):
            for step in join.batches(range(lengths[rank])):
                optimizer.zero_grad()
                ddp(inputs(rank, epoch, step)).square().mean().backward()
                for p in () if local else parameters:
                    dist.all_reduce(p.grad)
                optimizer.step()
                seen = [[p.tolist(), sgd.state[p]["momentum_buffer"].tolist()] for p in parameters]
    after = [[p.tolist(), sgd.state[p]["momentum_buffer"].tolist()] for p in parameters]
    body = [[p.tolist(), sgd.state[p]["momentum_buffer"].tolist()] for p in model.body.parameters()]
    return seen, after, body


@pytest.mark.covering(1)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("local", "options", "goes"),
    [
        (True, {}, False),
        (False, {}, True),
        (True, {"hand_over_ignored": True}, True),
        (False, {"hand_over_ignored": False}, False),
        (False, {"audit": False}, True),
    ],
)
def test_parameters_that_ddp_ignores(
    workers: Workers, local: bool, options: dict[str, Any], goes: bool, wrapped: bool
) -> None:
    (_, after, body), (seen, other, other_body) = workers.run(2, train_ignored, local, options, wrapped)
    assert body == other_body
    if goes:
        assert after == other
    else:
        assert after != other
        assert other == seen  # rank 1 ends early in the last epoch: neither its weights nor their state have changed
