"""What a drawn program trains, and by what: models, optimizers, schedules, and other objects that have a state."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

from tests.soak.idioms.worlds import FEATURES, OUTPUTS

HIDDEN = 8


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x))  # type: ignore[no-any-return]


def normalized(norm: Callable[[int], nn.Module]) -> nn.Module:
    # Without a bias, whose gradient is rounding noise before a norm of the batch.
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN, bias=False), norm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))


def reparametrized(*layers: str, by: Callable[..., Any]) -> nn.Module:
    net = Layers()
    for name in layers:
        by(getattr(net, name))
    return net


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.last(self.again(x))


class Recurrent(nn.Module):
    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cells, self.last = cell(2, 5, batch_first=True), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.view(-1, 3, 2))[0][:, -1])  # type: ignore[no-any-return]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, (2, 2)), nn.Linear(8, OUTPUTS)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.view(-1, 1, 2, 3))).flatten(1))  # type: ignore[no-any-return]


class Embedded(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(12, 4, sparse=sparse), nn.Linear(4 * FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows((x * 7).long() % 12).flatten(1))  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(12, OUTPUTS)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x.view(-1, 3, 2))).flatten(1))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Parameters without dimensions, without elements, transposed, in lists; views of one storage; lone buffers."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, (FEATURES + 1) * OUTPUTS)
        self.weight = nn.Parameter(flat[: FEATURES * OUTPUTS].view(OUTPUTS, FEATURES))
        self.bias = nn.Parameter(flat[FEATURES * OUTPUTS :])
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.linspace(0, 1, OUTPUTS**2).view(OUTPUTS, OUTPUTS).t())
        self.listed = nn.ParameterList([torch.ones(OUTPUTS), torch.ones(OUTPUTS)])
        self.register_buffer("shift", torch.ones(OUTPUTS), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        rows = functional.linear(x, self.weight, self.bias) * self.scale * self.listed[0] + self.listed[1] + self.shift
        return rows @ self.turned + self.empty.sum()  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Experts, of which the data chooses one: parameters that are not used differ by rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, OUTPUTS) for _ in range(3))
        self.gate = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x[0, 0] * 100) % 3
        return self.experts[chosen](x) * torch.softmax(self.gate(x), 1)[:, chosen : chosen + 1]  # type: ignore[no-any-return]


class Taking(nn.Module):
    """Takes another layer in each forward, by a buffer that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = (
            nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3)),
            nn.Linear(FEATURES, OUTPUTS),
        )
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layers[int(self.turn) % 3]
        if self.training:
            self.turn += 1
        return self.last(torch.tanh(layer(x)))  # type: ignore[no-any-return]


class Cooling(Layers):
    """Divides by a temperature in a buffer, which each forward binds anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature = self.temperature * 0.9
        return super().forward(x) / self.temperature


class Checkpointed(Layers):
    def encode(self, x: Tensor) -> Tensor:
        return checkpoint(super().encode, x, use_reentrant=False)  # type: ignore[no-any-return]


class Twice(Layers):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(super().encode(x)))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantized(Layers):
    def encode(self, x: Tensor) -> Tensor:
        weight = Rounded.apply(self.middle.weight)  # type: ignore[no-untyped-call]
        return torch.tanh(functional.linear(torch.tanh(self.first(x)), weight, self.middle.bias))


class Extra(Layers):
    """Counts forwards in what `get_extra_state` returns."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(x) * (1 + 0.1 * self.count)


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.last = nn.Parameter(torch.full((4,), 1 + 0.3j, dtype=torch.complex128)), nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=FEATURES))  # type: ignore[no-any-return]


class Codebook(Layers):
    """A codebook in a buffer that each forward moves by the mean of all rows of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(HIDDEN))

    def encode(self, x: Tensor) -> Tensor:
        found = super().encode(x)
        if self.training:
            self.codes.lerp_(found.detach().mean(0), 0.2)
        return found - 0.1 * self.codes


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": Layers,
    "layer norm": partial(normalized, nn.LayerNorm),
    "batch norm": partial(normalized, nn.BatchNorm1d),
    "weight norm": partial(reparametrized, "first", "middle", by=parametrizations.weight_norm),
    "spectral norm": partial(reparametrized, "first", "last", by=parametrizations.spectral_norm),
    "old spectral norm": partial(reparametrized, "first", "middle", by=nn.utils.spectral_norm),
    "orthogonal": partial(reparametrized, "middle", by=parametrizations.orthogonal),
    "tied": Tied,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
    "convolved": Convolved,
    "embedded": Embedded,
    "sparse": partial(Embedded, True),
    "attending": Attending,
    "odd": Odd,
    "gated": Gated,
    "taking": Taking,
    "cooling": Cooling,
    "checkpointed": Checkpointed,
    "twice": Twice,
    "quantized": Quantized,
    "extra": Extra,
    "filtered": Filtered,
    "codebook": Codebook,
}
UNUSED = ("gated", "taking")

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximizing": partial(optim.SGD, lr=0.01, maximize=True, foreach=True),
    "tensor rate": lambda ps: optim.SGD(ps, lr=torch.tensor(0.05), momentum=0.5),
    "adam": partial(optim.Adam, lr=0.02),
    "amsgrad": partial(optim.Adam, lr=0.02, amsgrad=True, foreach=True),
    "adamw": partial(optim.AdamW, lr=0.02, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5),
    "rprop": partial(optim.Rprop, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.02, decoupled_weight_decay=True),
    "radam": partial(optim.RAdam, lr=0.02),
    "asgd": partial(optim.ASGD, lr=0.05, t0=2),
    "adamax": partial(optim.Adamax, lr=0.02),
    "adafactor": partial(optim.Adafactor, lr=0.05),
    "lbfgs": partial(optim.LBFGS, lr=0.1, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0),
    "zero": lambda ps: ZeroRedundancyOptimizer(ps, optim.Adam, lr=0.02),
}

SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "step": partial(schedulers.StepLR, step_size=2, gamma=0.5),
    "one cycle": partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=60, cycle_momentum=False),
    "cyclic": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, cycle_momentum=False),
    "restarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.95), schedulers.ConstantLR(o, 0.5, 4)]
    ),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 8)], [3]
    ),
    "plateau": partial(schedulers.ReduceLROnPlateau, factor=0.5, patience=0),
    "lambda": partial(schedulers.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "multiplied": partial(schedulers.MultiplicativeLR, lr_lambda=lambda step: 0.95),
    "polynomial": partial(schedulers.PolynomialLR, total_iters=40, power=2.0),
    "swa": partial(optim.swa_utils.SWALR, swa_lr=0.001, anneal_epochs=4),
    "milestones": partial(schedulers.MultiStepLR, milestones=[2, 5, 6], gamma=0.3),
}


class Lookahead:
    """An optimizer around another one: its slow weights follow at each third step."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for slow, p in zip(self.slow, fast, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.steps = state["steps"]
        for mine, other in zip(self.slow, state["slow"], strict=True):
            mine.copy_(other)


class Average:
    """An average of the parameters and buffers."""

    def __init__(self, net: nn.Module) -> None:
        self.state, self.updates = copy.deepcopy(net.state_dict()), 0

    def update(self, net: nn.Module) -> None:
        self.updates += 1
        for name, value in net.state_dict().items():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.state[name] = 0.8 * self.state[name] + 0.2 * value

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state, self.updates = state["state"], state["updates"]


class Progress:
    """What a loop counts."""

    steps = micro = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps, "micro": self.micro}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps, self.micro = state["steps"], state["micro"]
